//! Grouped bars: a group per category, with one bar per series.

use std::fmt::Write;

use super::axis::{Axis, BOTTOM, LEFT, RIGHT};
use super::{Figure, color, escape};

/// Share of a group's width that its bars fill.
const FILLED: f64 = 0.7;
/// Widest bar.
const WIDEST: f64 = 46.0;
/// With more bars than this their values would overlap.
const LABELLED: usize = 9;
/// Longest name under a group.
const LONGEST_NAME: usize = 16;

/// A value, and its standard error if that is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bar {
    /// The value.
    pub value: f64,
    /// Its standard error.
    pub error: Option<f64>,
}

/// Values of several series over the same categories.
#[derive(Debug)]
pub struct BarChart {
    /// The title above the chart.
    pub title: String,
    /// Unit of the values, or what the mark stands for.
    pub unit: &'static str,
    /// Names under the groups.
    pub categories: Vec<String>,
    /// Name of each series, and its value in each category, if it has one.
    pub series: Vec<(String, Vec<Option<Bar>>)>,
    /// Where a horizontal line is drawn, such as the baseline's value.
    pub mark: f64,
}

impl Bar {
    fn text(self) -> String {
        let error = self.error.map(|error| format!(" \u{b1} {error:.2}"));
        format!("{:.2}{}", self.value, error.unwrap_or_default())
    }
}

impl BarChart {
    /// A figure with its title and legend; empty if there is no bar.
    pub fn html(&self) -> String {
        let count = self.bars().count();
        if count == 0 {
            return String::new();
        }
        let top = self.bars().map(|bar| bar.value + bar.error.unwrap_or(0.0));
        let up = Axis::up(0.0..top.fold(self.mark, f64::max) * 1.12);
        let figure = Figure {
            title: &self.title,
            unit: self.unit,
            names: self.series.iter().map(|(name, _)| name.as_str()).collect(),
            legend: "box",
            words: self.words(),
            attributes: "class=\"bars\"".to_owned(),
            drawing: self.grid(&up) + &self.drawing(&up, count <= LABELLED),
        };
        figure.html()
    }

    fn bars(&self) -> impl Iterator<Item = Bar> {
        self.series.iter().flat_map(|(_, values)| values.iter().flatten().copied())
    }

    /// The middle of a group.
    fn middle(&self, group: usize) -> f64 {
        LEFT + (RIGHT - LEFT) * (group as f64 + 0.5) / self.categories.len() as f64
    }

    fn grid(&self, up: &Axis) -> String {
        let mut text = String::new();
        for (value, label) in up.ticks() {
            let y = up.at(value);
            let _ = write!(
                text,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 6.0,
                y + 4.0
            );
        }
        for (group, name) in self.categories.iter().enumerate() {
            let short: String = name.chars().take(LONGEST_NAME).collect();
            let dots = if short.len() < name.len() { "\u{2026}" } else { "" };
            let _ = write!(
                text,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}{dots}</text>",
                self.middle(group),
                BOTTOM + 16.0,
                escape(&short)
            );
        }
        text
    }

    fn drawing(&self, up: &Axis, labelled: bool) -> String {
        let group_width = (RIGHT - LEFT) / self.categories.len() as f64;
        let width = (group_width * FILLED / self.series.len() as f64).min(WIDEST);
        let mut text = String::new();
        for (index, (name, values)) in self.series.iter().enumerate() {
            let _ = write!(text, "<g class=\"{}\">", color(index));
            let offset = (index as f64 - self.series.len() as f64 / 2.0) * width;
            for (group, bar) in values.iter().enumerate() {
                let Some(bar) = bar else { continue };
                let (x, y) = (self.middle(group) + offset, up.at(bar.value));
                let _ = write!(
                    text,
                    "<rect class=\"bar\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\">\
                     <title>{}, {}: {}</title></rect>",
                    x + 1.0,
                    width - 2.0,
                    BOTTOM - y,
                    escape(&self.categories[group]),
                    escape(name),
                    bar.text()
                );
                text += &error_line(*bar, x + width / 2.0, up);
                if labelled {
                    let top = up.at(bar.value + bar.error.unwrap_or(0.0)) - 5.0;
                    let _ = write!(
                        text,
                        "<text x=\"{:.1}\" y=\"{top:.1}\" text-anchor=\"middle\">{:.2}</text>",
                        x + width / 2.0,
                        bar.value
                    );
                }
            }
            text += "</g>";
        }
        let mark = up.at(self.mark);
        let _ = write!(text, "<path class=\"axis\" d=\"M{LEFT} {BOTTOM}H{RIGHT}\"/>");
        let _ = write!(text, "<path class=\"mark\" d=\"M{LEFT} {mark:.1}H{RIGHT}\"/>");
        text
    }

    fn words(&self) -> String {
        let series = self.series.iter().flat_map(|(name, values)| {
            let pairs = self.categories.iter().zip(values);
            pairs.filter_map(move |(category, bar)| {
                Some(format!("{category}, {name}: {}", (*bar)?.text()))
            })
        });
        series.collect::<Vec<_>>().join("; ")
    }
}

/// The range of a standard error around a value.
fn error_line(bar: Bar, x: f64, up: &Axis) -> String {
    let Some(error) = bar.error.filter(|error| error.is_finite() && *error > 0.0) else {
        return String::new();
    };
    let (low, high) = (up.at((bar.value - error).max(0.0)), up.at(bar.value + error));
    format!(
        "<path class=\"error\" d=\"M{0:.1} {low:.1}H{1:.1}M{x:.1} {low:.1}V{high:.1}M{0:.1} {high:.1}H{1:.1}\"/>",
        x - 4.0,
        x + 4.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_a_bar_and_every_category_a_label() {
        let bar = |value| Some(Bar { value, error: Some(0.25) });
        let chart = |values: Vec<Option<Bar>>| BarChart {
            title: "Speed-up <by set>".into(),
            unit: "",
            categories: vec!["GSM8K".into(), "MATH-500".into()],
            series: vec![("a".into(), values), ("b".into(), vec![bar(1.5), bar(2.5)])],
            mark: 1.0,
        };
        let html = chart(vec![bar(2.0), None]).html();
        assert_eq!(html.matches("<rect").count(), 3, "{html}");
        assert_eq!(html.matches("class=\"error\"").count(), 3, "{html}");
        for text in ["MATH-500", "Speed-up &lt;by set&gt;", "GSM8K, a: 2.00 \u{b1} 0.25; "] {
            assert!(html.contains(text), "{text}: {html}");
        }
        let empty = BarChart { series: vec![("a".into(), vec![None])], ..chart(Vec::new()) };
        assert_eq!(empty.html(), "");
    }
}
