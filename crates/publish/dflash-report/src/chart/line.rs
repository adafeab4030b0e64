//! Lines over a common axis.

use std::fmt::Write;

use super::axis::{Axis, BOTTOM, HEIGHT, LEFT, RIGHT, TOP, capped, number, range};
use super::{Figure, color, escape};

/// Maximum number of points per line: a screen shows no more, and a page of many lines stays small.
const POINTS: usize = 800;
/// Lines with at most this many points show the points too; a single point would be invisible.
const DOTTED: usize = 30;

/// Named lines over a common axis.
#[derive(Debug)]
pub struct Chart {
    /// The title above the chart.
    pub title: String,
    /// Unit of the values; empty if they have none.
    pub unit: &'static str,
    /// What the horizontal axis counts.
    pub axis: &'static str,
    /// Name and points of each line.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Chart {
    /// A chart over steps, without lines that have no points.
    pub fn over_steps(
        title: &str,
        unit: &'static str,
        lines: Vec<(&str, Vec<(f64, f64)>)>,
    ) -> Self {
        let lines = lines
            .into_iter()
            .filter(|(_, points)| !points.is_empty())
            .map(|(name, points)| (name.to_owned(), points))
            .collect();
        Self { title: title.to_owned(), unit, axis: "step", lines }
    }

    /// A figure with its title and legend; empty if there is no line.
    pub fn html(&self) -> String {
        if self.lines.is_empty() {
            return String::new();
        }
        let points = || self.lines.iter().flat_map(|(_, points)| points.iter());
        let across = range(points().map(|point| point.0), false);
        let counts = points().all(|point| point.0.fract() == 0.0);
        let across = Axis::across(across, 7, counts);
        // Only a run begins with values that soon do not matter.
        let is_run = self.axis == "step";
        let most = capped(points().map(|point| point.1)).filter(|_| is_run);
        let values = points().map(|point| point.1.min(most.unwrap_or(f64::INFINITY)));
        let up = Axis::up(range(values, true));
        let lines = self.lines.iter().enumerate();
        let lines: String =
            lines.map(|(index, (name, points))| line(index, name, points, &across, &up)).collect();
        let figure = Figure {
            title: &self.title,
            unit: self.unit,
            names: self.lines.iter().map(|(name, _)| name.as_str()).collect(),
            legend: "",
            words: self.words(most),
            attributes: format!(
                "class=\"plot\" data-axis=\"{}\" data-left=\"{LEFT}\" data-right=\"{RIGHT}\" \
                 data-from=\"{}\" data-to=\"{}\"",
                escape(self.axis),
                across.values.start,
                across.values.end
            ),
            drawing: format!("{}{lines}{}", grid(&across, &up, self.axis), cursor()),
        };
        figure.html()
    }

    /// The end of each line, and the highest value if it lies above `most`, the top of the plot.
    fn words(&self, most: Option<f64>) -> String {
        let ends = self.lines.iter().filter_map(|(name, points)| {
            let (at, value) = points.last()?;
            Some((number(*at), format!("{name} {}", number(*value))))
        });
        let mut text = String::new();
        let mut before = None;
        for (at, end) in ends {
            if before.as_ref() == Some(&at) {
                let _ = write!(text, " \u{b7} {end}");
            } else {
                let semicolon = if text.is_empty() { "" } else { "; " };
                let _ = write!(text, "{semicolon}{} {at}: {end}", self.axis);
            }
            before = Some(at);
        }
        if most.is_some() {
            let values = self.lines.iter().flat_map(|(_, points)| points.iter());
            let highest = values.map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
            let _ = write!(text, "; highest {}, above the plot", number(highest));
        }
        text
    }
}

/// Round numbers of both axes, and the vertical one's lines.
fn grid(across: &Axis, up: &Axis, name: &str) -> String {
    let mut text = String::new();
    for (value, label) in up.ticks() {
        let (y, x) = (up.at(value), LEFT - 6.0);
        let _ = write!(
            text,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>\
             <text x=\"{x}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            y + 4.0
        );
    }
    for (value, label) in across.ticks() {
        let _ = write!(
            text,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            across.at(value),
            BOTTOM + 16.0
        );
    }
    let (middle, bottom) = ((LEFT + RIGHT) / 2.0, HEIGHT - 4.0);
    let _ = write!(
        text,
        "<path class=\"axis\" d=\"M{LEFT} {BOTTOM}H{RIGHT}\"/>\
         <text x=\"{middle}\" y=\"{bottom}\" text-anchor=\"middle\">{}</text>",
        escape(name)
    );
    text
}

/// The line that follows the pointer.
fn cursor() -> String {
    format!("<path class=\"cursor\" d=\"M0 {TOP}V{BOTTOM}\"/>")
}

fn line(index: usize, name: &str, points: &[(f64, f64)], across: &Axis, up: &Axis) -> String {
    let points = thinned(points);
    let places: Vec<(f64, f64)> =
        points.iter().map(|point| (across.at(point.0), up.at(point.1))).collect();
    let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let values: Vec<String> = points
        .iter()
        .zip(&places)
        .map(|((at, value), (_, y))| format!("{at},{},{y:.1}", number(*value)))
        .collect();
    let dots: String = match points.len() <= DOTTED {
        true => places
            .iter()
            .map(|(x, y)| format!("<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"/>"))
            .collect(),
        false => String::new(),
    };
    format!(
        "<g class=\"{}\"><path class=\"line\" data-name=\"{}\" data-values=\"{}\" d=\"M{}\"/>{dots}</g>",
        color(index),
        escape(name),
        values.join(" "),
        path.join("L")
    )
}

/// Every n-th point and the last, so that at most about [`POINTS`] remain.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let stride = points.len().div_ceil(POINTS).max(1);
    let last = points.len() - 1;
    let kept = |(index, _): &(usize, &(f64, f64))| index % stride == 0 || *index == last;
    points.iter().enumerate().filter(kept).map(|(_, &point)| point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_thinned_and_keep_their_end() {
        let points: Vec<(f64, f64)> = (0..10_001).map(|x| (f64::from(x), 0.0)).collect();
        let thin = thinned(&points);
        assert!(thin.len() <= POINTS + 2, "{}", thin.len());
        assert_eq!((thin[0].0, thin[thin.len() - 1].0), (0.0, 10_000.0));
        assert_eq!(thinned(&points[..7]).len(), 7);
    }

    #[test]
    fn a_chart_says_its_ends_and_carries_its_points() {
        let lines = vec![("a<b", vec![(1.0, 2.0), (3.0, 4.0)]), ("late", vec![(2.0, 0.5)])];
        let html = Chart::over_steps("Loss", "nats", lines).html();
        for text in [
            "<h3>Loss <span class=\"unit\">nats</span></h3>",
            "<desc>step 3: a&lt;b 4; step 2: late 0.5</desc>",
            "data-name=\"a&lt;b\" data-values=\"1,2,",
            "<li class=\"c2\">late</li>",
            "role=\"img\" aria-label=\"Loss\"",
        ] {
            assert!(html.contains(text), "{text} in\n{html}");
        }
        assert_eq!(Chart::over_steps("Loss", "", vec![("a", Vec::new())]).html(), "");
    }
}
