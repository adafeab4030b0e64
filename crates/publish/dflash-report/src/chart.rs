//! Charts as SVG inside HTML pages that need no other file.
//!
//! Colours come from the page's style, so a chart is light or dark with its page. Every line carries
//! its points for [`SCRIPT`], which shows the values under the pointer or, by arrow keys, at a
//! cursor. All outside text goes through [`escape`].

mod axis;
mod bars;
mod line;

pub use axis::number;
pub use bars::{Bar, BarChart};
pub use dflash_http::escape;
pub use line::Chart;

/// Shows values under the pointer; the script of every page with charts.
pub const SCRIPT: &str = include_str!("chart/plots.js");

/// Number of colours in the page's style.
const COLORS: usize = 6;

/// What stands around a drawing.
struct Figure<'a> {
    title: &'a str,
    unit: &'a str,
    /// Names of the series, in the order of the colours; shown if there are several.
    names: Vec<&'a str>,
    legend: &'static str,
    /// The drawing in words.
    words: String,
    /// Attributes of the `svg` element.
    attributes: String,
    drawing: String,
}

impl Figure<'_> {
    fn html(&self) -> String {
        let (title, words) = (escape(self.title), escape(&self.words));
        let unit = match self.unit.is_empty() {
            true => String::new(),
            false => format!(" <span class=\"unit\">{}</span>", escape(self.unit)),
        };
        let legend = match self.names.len() {
            0 | 1 => String::new(),
            _ => self.legend(),
        };
        let (width, height) = (axis::WIDTH, axis::HEIGHT);
        format!(
            "<figure class=\"chart\"><figcaption><h3>{title}{unit}</h3></figcaption>{legend}\
             <svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\" \
             aria-description=\"{words}\" tabindex=\"0\" {}><desc>{words}</desc>{}</svg>\
             <p class=\"value\" aria-live=\"polite\">{words}</p></figure>\n",
            self.attributes, self.drawing
        )
    }

    fn legend(&self) -> String {
        let items = self.names.iter().enumerate();
        let items: String = items
            .map(|(index, name)| format!("<li class=\"{}\">{}</li>", color(index), escape(name)))
            .collect();
        format!("<ul class=\"legend {}\">{items}</ul>", self.legend)
    }
}

/// The style's class for the colour of series `index`.
fn color(index: usize) -> String {
    format!("c{}", index % COLORS + 1)
}
