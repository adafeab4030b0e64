//! Lines over a common axis.

use std::ops::Range;

use plotters::prelude::*;

use super::{COLORS, SIZE, figure};

/// Maximum number of points per line: a screen shows no more, and a page of many lines stays small.
const POINTS: usize = 800;
/// Lines with at most this many points show the points too; a single point would be invisible.
const DOTTED: usize = 30;

/// Named lines over a common axis.
#[derive(Debug)]
pub struct Chart {
    /// The title above the chart.
    pub title: String,
    /// What the horizontal axis counts.
    pub axis: &'static str,
    /// Name and points of each line.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Chart {
    /// A chart over steps, without lines that have no points.
    pub fn over_steps(title: &str, lines: Vec<(&str, Vec<(f64, f64)>)>) -> Self {
        let lines = lines
            .into_iter()
            .filter(|(_, points)| !points.is_empty())
            .map(|(name, points)| (name.to_owned(), points))
            .collect();
        Self { title: title.to_owned(), axis: "step", lines }
    }

    /// A figure with its title and legend; empty if there is no line.
    pub fn html(&self) -> String {
        if self.lines.is_empty() {
            return String::new();
        }
        figure(&self.title, self.lines.iter().map(|(name, _)| name.as_str()), &self.svg())
    }

    fn svg(&self) -> String {
        let mut svg = String::new();
        self.draw(&mut svg).expect("drawing into a string does not fail");
        svg
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let points = || self.lines.iter().flat_map(|(_, points)| points.iter());
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(62)
            .build_cartesian_2d(
                range(points().map(|point| point.0), false),
                range(points().map(|point| point.1), true),
            )?;
        chart
            .configure_mesh()
            .x_desc(self.axis)
            .x_labels(8)
            .y_labels(6)
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(225, 225, 225))
            .x_label_formatter(&|value| number(*value))
            .y_label_formatter(&|value| number(*value))
            .draw()?;
        for ((_, points), color) in self.lines.iter().zip(COLORS.iter().cycle()) {
            let points = thinned(points);
            if points.len() <= DOTTED {
                let dots = points.iter().map(|&point| Circle::new(point, 2, color.filled()));
                chart.draw_series(dots)?;
            }
            chart.draw_series(LineSeries::new(points, color.stroke_width(2)))?;
        }
        root.present()?;
        Ok(())
    }
}

/// From the least to the greatest value, with a margin above and below; from 0 if that is near.
fn range(values: impl Iterator<Item = f64>, with_margin: bool) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low == high {
        let margin = if low == 0.0 { 1.0 } else { low.abs() / 2.0 };
        return low - margin..high + margin;
    }
    if !with_margin {
        return low..high;
    }
    let margin = (high - low) * 0.05;
    let floor = if low >= 0.0 && low < 0.4 * high { 0.0 } else { low - margin };
    floor..high + margin
}

/// Every n-th point and the last, so that at most about [`POINTS`] remain.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let stride = points.len().div_ceil(POINTS).max(1);
    let last = points.len() - 1;
    let kept = |(index, _): &(usize, &(f64, f64))| index % stride == 0 || *index == last;
    points.iter().enumerate().filter(kept).map(|(_, &point)| point).collect()
}

/// A number as an axis label.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        1e6.. => format!("{:.4}M", value / 1e6).replace(".0000", ""),
        1e4.. => format!("{value:.0}"),
        ..1e-3 => format!("{value:.1e}"),
        _ => format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_a_margin_and_begin_at_zero_where_that_is_near() {
        let of = |values: &[f64], margin| range(values.iter().copied(), margin);
        assert_eq!(of(&[1.0, 9.0], false), 1.0..9.0);
        assert_eq!(of(&[1.0, 11.0], true), 0.0..11.5);
        assert_eq!(of(&[90.0, 100.0], true), 89.5..100.5);
        assert_eq!(of(&[4.0], true), 2.0..6.0);
        assert_eq!(of(&[0.0, 0.0], true), -1.0..1.0);
    }

    #[test]
    fn long_lines_are_thinned_and_keep_their_end() {
        let points: Vec<(f64, f64)> = (0..10_001).map(|x| (f64::from(x), 0.0)).collect();
        let thin = thinned(&points);
        assert!(thin.len() <= POINTS + 2, "{}", thin.len());
        assert_eq!((thin[0].0, thin[thin.len() - 1].0), (0.0, 10_000.0));
        assert_eq!(thinned(&points[..7]).len(), 7);
    }

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 0.25, 12.0, 6e-4, 123_456.0, 2_500_000.0].map(number);
        assert_eq!(texts, ["0", "0.25", "12", "6.0e-4", "123456", "2.5000M"]);
    }
}
