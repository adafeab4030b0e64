//! Grouped bars: a group per category, with one bar per series.

use plotters::prelude::*;

use super::line::number;
use super::{COLORS, SIZE, figure};

/// Share of a group's width that its bars fill.
const FILLED: f64 = 0.8;

/// Values of several series over the same categories.
#[derive(Debug)]
pub struct BarChart {
    /// The title above the chart.
    pub title: String,
    /// Names under the groups.
    pub categories: Vec<String>,
    /// Name of each series, and its value in each category, if it has one.
    pub series: Vec<(String, Vec<Option<f64>>)>,
    /// Where a horizontal line is drawn, such as the baseline's value.
    pub mark: f64,
}

impl BarChart {
    /// A figure with its title and legend; empty if there is no bar.
    pub fn html(&self) -> String {
        if self.values().next().is_none() {
            return String::new();
        }
        let mut svg = String::new();
        self.draw(&mut svg).expect("drawing into a string does not fail");
        figure(&self.title, self.series.iter().map(|(name, _)| name.as_str()), &svg)
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.series.iter().flat_map(|(_, values)| values.iter().flatten().copied())
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let top = self.values().fold(self.mark, f64::max) * 1.08;
        let groups = self.categories.len() as f64;
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(62)
            .build_cartesian_2d(-0.5..groups - 0.5, 0.0..top)?;
        let name = |at: &f64| self.name_at(*at);
        chart
            .configure_mesh()
            .disable_x_mesh()
            // An odd number of labels puts one under the middle of each group.
            .x_labels(2 * self.categories.len() + 1)
            .x_label_formatter(&name)
            .x_label_style(("sans-serif", 9))
            .y_labels(6)
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(225, 225, 225))
            .y_label_formatter(&|value| number(*value))
            .draw()?;
        let width = FILLED / self.series.len() as f64;
        for (index, ((_, values), color)) in
            self.series.iter().zip(COLORS.iter().cycle()).enumerate()
        {
            let left = |group: usize| group as f64 - FILLED / 2.0 + index as f64 * width;
            let bars = values.iter().enumerate().filter_map(|(group, value)| {
                let corners = [(left(group), 0.0), (left(group) + width, (*value)?)];
                Some(Rectangle::new(corners, color.filled()))
            });
            chart.draw_series(bars)?;
        }
        let mark = [(-0.5, self.mark), (groups - 0.5, self.mark)];
        chart.draw_series(LineSeries::new(mark, BLACK.stroke_width(1)))?;
        root.present()?;
        Ok(())
    }

    /// The category whose middle is at `at`.
    fn name_at(&self, at: f64) -> String {
        let is_middle = (at - at.round()).abs() < 1e-6 && at > -0.25;
        let name = is_middle.then(|| self.categories.get(at.round() as usize)).flatten();
        name.cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_a_bar_and_every_category_a_label() {
        let chart = |values: Vec<Option<f64>>| BarChart {
            title: "Speed-up <by set>".into(),
            categories: vec!["GSM8K".into(), "MATH-500".into()],
            series: vec![("a".into(), values), ("b".into(), vec![Some(1.5), Some(2.5)])],
            mark: 1.0,
        };
        let html = chart(vec![Some(2.0), None]).html();
        assert_eq!(html.matches("<rect").count(), 3, "{html}");
        for text in ["GSM8K", "MATH-500", "Speed-up &lt;by set&gt;"] {
            assert!(html.contains(text), "{text}: {html}");
        }
        let empty = BarChart { series: vec![("a".into(), vec![None])], ..chart(Vec::new()) };
        assert_eq!(empty.html(), "");
    }
}
