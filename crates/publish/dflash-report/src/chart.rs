//! Charts as SVG inside HTML pages that need no other file.
//!
//! All outside text goes through [`escape`].

mod bars;
mod line;

pub use bars::BarChart;
pub use line::{Chart, number};

use plotters::prelude::RGBColor;

/// The style of every page.
pub const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;\
padding:0 1rem;color:#222}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}\
.charts{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 480px;max-width:580px}\
figcaption span{font-size:.85rem}svg{max-width:100%;height:auto}table{border-collapse:collapse}\
td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top;\
border-bottom:1px solid #eee;overflow-wrap:anywhere}td.n,th.n{text-align:right}\
.note{color:#a33}code{white-space:pre-wrap}";

const SIZE: (u32, u32) = (560, 280);
const COLORS: [RGBColor; 5] = [
    RGBColor(31, 111, 180),
    RGBColor(214, 98, 28),
    RGBColor(44, 140, 60),
    RGBColor(130, 80, 170),
    RGBColor(110, 110, 110),
];

/// Text as HTML shows it, in elements and in quoted attributes.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

/// A drawing with its title above it, and a legend of `names` in the order of the colors.
fn figure<'a>(title: &str, names: impl Iterator<Item = &'a str>, svg: &str) -> String {
    let legend: String = names
        .zip(COLORS.iter().cycle())
        .map(|(name, RGBColor(r, g, b))| {
            format!("<span style=\"color:rgb({r},{g},{b})\">&#9644; {}</span> ", escape(name))
        })
        .collect();
    format!("<figure><figcaption><b>{}</b> {legend}</figcaption>{svg}</figure>\n", escape(title))
}
