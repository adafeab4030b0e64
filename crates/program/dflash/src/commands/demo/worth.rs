//! The speed-up from speculation, taken from evaluation reports, one line per decoding method.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde_json::Value;

const RATE: &str = "decode_tokens_per_second";

/// Measurements with one target.
#[derive(Debug)]
pub(super) struct Worth {
    target: &'static str,
    /// Size of its weights in bytes.
    bytes: u64,
    /// Report written by `dflash eval`.
    report: Value,
}

impl Worth {
    /// Reads the report `json` for the target in `dir`.
    pub(super) fn read(target: &'static str, dir: &Path, json: &Path) -> anyhow::Result<Self> {
        let weights = dir.join("model.safetensors");
        let facts = fs::metadata(&weights);
        let bytes = facts.with_context(|| format!("cannot read {}", weights.display()))?.len();
        let text = fs::read(json).with_context(|| format!("cannot read {}", json.display()))?;
        let report = serde_json::from_slice(&text);
        let report = report.with_context(|| format!("{} is no report", json.display()))?;
        Ok(Self { target, bytes, report })
    }

    /// The results with drafts, and that of plain decoding.
    fn results(&self) -> (Vec<&Value>, Option<&Value>) {
        let all = self.report["results"].as_array().map(Vec::as_slice).unwrap_or_default();
        let (plain, drafts): (Vec<_>, _) = all.iter().partition(|one| one["draft"] == "none");
        (drafts, plain.first().copied())
    }
}

/// The table for all targets.
pub(super) fn shown(rows: &[Worth]) -> String {
    let mut text = "speed-up from speculation, tokens per second after the first\n".to_owned();
    let title = ["plain", "speculative", "speed-up"];
    let _ = writeln!(text, "{:46}{:>9}{:>13}{:>10}", "", title[0], title[1], title[2]);
    for worth in rows {
        let (drafts, plain) = worth.results();
        let plain = plain.and_then(|plain| plain[RATE].as_f64());
        for draft in drafts {
            let is_auto = draft["draft"].as_str().is_some_and(|name| name.ends_with(" auto"));
            let way = if is_auto { ", auto" } else { "" };
            let megabytes = worth.bytes as f64 / 1e6;
            let name = format!("{}, {megabytes:.1} MB of weights{way}", worth.target);
            let figure = |value: Option<f64>| value.map_or("-".to_owned(), |x| format!("{x:.1}"));
            let rate = draft[RATE].as_f64();
            let gain = rate.zip(plain).map(|(rate, plain)| rate / plain);
            let gain = gain.map_or("-".to_owned(), |gain| format!("{gain:.2}x"));
            let (plain, rate) = (figure(plain), figure(rate));
            let _ = writeln!(text, "{name:46}{plain:>9}{rate:>13}{gain:>10}");
        }
    }
    text + "Widened, its output is the same, but its weights are read from memory, like those of real models.\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_way_has_its_line_with_its_own_gain() {
        let report = json!({"results": [
            {"draft": "none", "decode_tokens_per_second": 100.0},
            {"draft": "step-4", "decode_tokens_per_second": 250.0},
            {"draft": "step-4 auto", "decode_tokens_per_second": 99.0},
        ]});
        let text = shown(&[Worth { target: "it", bytes: 3_300_000, report }]);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[2], ["it,", "3.3", "MB", "of", "weights", "100.0", "250.0", "2.50x"]);
        let auto = ["it,", "3.3", "MB", "of", "weights,", "auto", "100.0", "99.0", "0.99x"];
        assert_eq!(lines[3], auto);
        assert_eq!(lines.len(), 5);
    }
}
