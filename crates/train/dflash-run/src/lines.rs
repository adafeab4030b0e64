//! The lines of `metrics.jsonl` and `validation.jsonl`.
//!
//! Validation's metrics have the names of training's; the file tells them apart. The aliases are
//! the names in runs of earlier releases.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::AcceptanceFigures;

/// A line of one of the two files.
pub trait Line: Serialize + DeserializeOwned {
    /// Name of the file.
    const FILE: &'static str;
    /// Trackers' name of the group.
    const GROUP: &'static str;
    /// Whether a line must be on disk before the run continues.
    const DURABLE: bool;

    /// Optimizer steps taken.
    fn step(&self) -> u64;

    /// The finite numbers of the line under trackers' tags, which docs/formats.md describes,
    /// without step and time, which are the axes, and the number of steps, which is none of them.
    fn scalars(&self) -> Vec<(String, f64)> {
        let mut found = Vec::new();
        let mut line = serde_json::to_value(self).expect("a line prints");
        let members = line.as_object_mut().expect("lines are objects");
        for over in ["step", "time", "total_steps"] {
            members.shift_remove(over);
        }
        collect(Self::GROUP.to_owned(), &line, &mut found);
        found
    }
}

/// Teacher-forced metrics: every block starts from the data's context. `None` without slots.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TeacherForced {
    #[serde(alias = "eval_loss")]
    pub loss: Option<f64>,
    #[serde(alias = "eval_accuracy")]
    pub accuracy: Option<f64>,
    #[serde(default, alias = "slot_accuracy", alias = "eval_slot_accuracy")]
    pub accuracy_by_slot: Vec<Option<f64>>,
    #[serde(alias = "expected_accepted", alias = "eval_expected_length")]
    pub expected_acceptance_length: Option<f64>,
    /// Metrics of the draft's head, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub head: BTreeMap<String, Option<f64>>,
}

/// One line of metrics: sums and ratios over the steps since the last. A number that is unknown, or
/// not finite, is null.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MetricLine {
    pub step: u64,
    /// `None` in runs of releases that did not record it.
    #[serde(default)]
    pub total_steps: Option<u64>,
    #[serde(default)]
    pub steps: Option<u64>,
    #[serde(default)]
    pub time: Option<f64>,
    #[serde(default)]
    pub elapsed_s: Option<f64>,
    pub epoch: Option<f64>,
    #[serde(flatten)]
    pub figures: TeacherForced,
    pub lr: Option<f64>,
    pub gradient_norm: Option<f64>,
    pub slots_per_s: Option<f64>,
    pub tokens_per_s: Option<f64>,
    pub tflops: Option<f64>,
    pub mfu: Option<f64>,
    pub data_wait_s: Option<f64>,
    pub data_wait_share: Option<f64>,
    /// Only if the target runs in the trainer's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_share: Option<f64>,
    pub interval_s: Option<f64>,
    pub eta_s: Option<f64>,
    pub peak_memory_mib: Option<f64>,
    #[serde(default)]
    pub samples: u64,
    #[serde(default)]
    pub tokens: u64,
    #[serde(default)]
    pub anchors: u64,
    #[serde(default)]
    pub skipped_samples: u64,
    #[serde(default)]
    pub bad_steps: u64,
    /// If set, checkpoints serve averaged weights; the metrics are those of the trained weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema_decay: Option<f64>,
    #[serde(default)]
    pub stream: Option<StreamCounters>,
}

/// Statistics of the hidden-state requests since the process started, all ranks.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamCounters {
    pub requests: u64,
    pub retries: u64,
    pub busy: u64,
    pub generated: u64,
    pub stored: u64,
    pub stale: u64,
    pub missing: u64,
    pub rejected: u64,
    pub invalid: u64,
    pub damaged: u64,
    pub cached: u64,
    pub bytes: u64,
}

/// One line of validation; keys that were not requested are absent.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ValidationLine {
    pub step: u64,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub rows: Option<HeldOutRows>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub prompts: Option<HeldOutPrompts>,
    pub seconds: Option<f64>,
}

/// Teacher-forced metrics of the held-out rows, with the same anchors every time.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOutRows {
    #[serde(flatten)]
    pub figures: TeacherForced,
    #[serde(alias = "eval_blocks")]
    pub blocks: u64,
    #[serde(default, alias = "eval_skipped")]
    pub skipped_samples: u64,
}

/// Metrics of real greedy decoding on the held-out prompts.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOutPrompts {
    #[serde(flatten)]
    pub figures: AcceptanceFigures,
    #[serde(default)]
    pub responses: u64,
}

/// Lines of one kind by step; of several for one step the last.
#[derive(Debug)]
pub struct Lines<T> {
    /// Whether the file exists.
    pub present: bool,
    /// By optimizer steps taken.
    pub by_step: BTreeMap<u64, T>,
    /// Lines that do not parse, such as a half-written last one.
    pub broken: usize,
    /// Whether the last of these has no end: while a run is alive it is on its way.
    pub is_torn: bool,
    /// Lines that a later one with the same step replaced.
    pub replaced: usize,
}

impl Line for MetricLine {
    const FILE: &'static str = "metrics.jsonl";
    const GROUP: &'static str = "train";
    const DURABLE: bool = false;

    fn step(&self) -> u64 {
        self.step
    }
}

impl Line for ValidationLine {
    const FILE: &'static str = "validation.jsonl";
    const GROUP: &'static str = "validation";
    /// A line represents minutes of work that a resumed run does not repeat.
    const DURABLE: bool = true;

    fn step(&self) -> u64 {
        self.step
    }
}

impl StreamCounters {
    /// All counts, for summing over ranks.
    pub fn counts(&mut self) -> [&mut u64; 12] {
        let Self { requests, retries, busy, generated, stored, stale, .. } = self;
        let Self { missing, rejected, invalid, damaged, cached, bytes, .. } = self;
        [
            requests, retries, busy, generated, stored, stale, missing, rejected, invalid, damaged,
            cached, bytes,
        ]
    }
}

impl<T: Line> Lines<T> {
    /// The lines in `text`, the contents of their file if it exists.
    pub(crate) fn parse(text: Option<&str>) -> Self {
        let (present, by_step) = (text.is_some(), BTreeMap::new());
        let mut lines = Self { present, by_step, broken: 0, is_torn: false, replaced: 0 };
        let tail = text.and_then(|text| text.rsplit('\n').next()).unwrap_or_default().trim();
        lines.is_torn = !tail.is_empty() && serde_json::from_str::<T>(tail).is_err();
        for line in text.unwrap_or_default().lines().filter(|line| !line.trim().is_empty()) {
            match serde_json::from_str::<T>(line) {
                Err(_) => lines.broken += 1,
                Ok(line) => {
                    let earlier = lines.by_step.insert(line.step(), line);
                    lines.replaced += usize::from(earlier.is_some());
                }
            }
        }
        lines
    }

    /// (step, value of `of`) of every line for which it is a finite number.
    pub fn points(&self, of: impl Fn(&T) -> Option<f64>) -> Vec<(f64, f64)> {
        let point = |(&step, line): (&u64, &T)| Some((step as f64, of(line)?));
        self.by_step.iter().filter_map(point).filter(|(_, value)| value.is_finite()).collect()
    }

    /// The line of the highest step.
    pub fn last(&self) -> Option<&T> {
        self.by_step.values().next_back()
    }
}

fn collect(path: String, value: &Value, found: &mut Vec<(String, f64)>) {
    match value {
        Value::Object(members) => {
            members.iter().for_each(|(key, value)| collect(format!("{path}/{key}"), value, found));
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, value)| collect(format!("{path}/{index:02}"), value, found));
        }
        other => found.extend(other.as_f64().map(|number| (path, number))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RunDir;

    fn figures() -> TeacherForced {
        TeacherForced {
            loss: Some(2.0),
            accuracy: Some(f64::NAN),
            accuracy_by_slot: vec![None, Some(0.5)],
            expected_acceptance_length: None,
            head: BTreeMap::from([("gain".to_owned(), Some(0.25))]),
        }
    }

    #[test]
    fn a_resumed_run_writes_no_step_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(MetricLine::FILE);
        let broken = b"{\"step\":10}\n\xff\xfe\n{\"step\":20}\n{\"step\":30}\n{\"st\xc3";
        std::fs::write(&path, broken).unwrap();
        RunDir::at(dir.path()).keep_until::<MetricLine>(20).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":10}\n{\"step\":20}\n");
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::at(dir.path());
        let stream = Some(StreamCounters { retries: 3, ..StreamCounters::default() });
        let line = MetricLine { step: 7, figures: figures(), stream, ..MetricLine::default() };
        run.append(&line).unwrap();
        run.append(&MetricLine { step: 9, ..MetricLine::default() }).unwrap();
        let lines = run.lines::<MetricLine>().unwrap();
        let mut expected = line;
        expected.figures.accuracy = None;
        assert_eq!(lines.by_step[&7], expected);
        assert_eq!((lines.by_step.len(), lines.broken), (2, 0));
    }

    #[test]
    fn a_validation_has_only_what_was_measured() {
        let acceptance = crate::Acceptance { reached: vec![2, 1], responses: 1, length_sum: 1.5 };
        let prompts = HeldOutPrompts { figures: acceptance.figures(), responses: 1 };
        let line = ValidationLine { step: 3, prompts: Some(prompts), ..ValidationLine::default() };
        let value = serde_json::to_value(&line).unwrap();
        assert_eq!((&value["acceptance_length"], &value["step"]), (&1.5.into(), &3.into()));
        assert!(value.get("loss").is_none() && value.get("blocks").is_none(), "{value}");
        assert_eq!(serde_json::from_value::<ValidationLine>(value).unwrap(), line);
    }

    #[test]
    fn lines_of_earlier_releases_are_read() {
        let text = r#"{"step":5,"eval_loss":3.5,"eval_accuracy":0.4,"eval_slot_accuracy":[null,0.4],
            "eval_expected_length":1.4,"eval_blocks":80,"eval_skipped":1,"tau_per_step":2.5,
            "tau_per_response":2.75,"accepted_by_slot":[0.75],"responses":8,"seconds":1.5}"#;
        let line: ValidationLine = serde_json::from_str(text).unwrap();
        let (rows, prompts) = (line.rows.unwrap(), line.prompts.unwrap());
        assert_eq!(rows.figures.loss, Some(3.5));
        assert_eq!(rows.figures.expected_acceptance_length, Some(1.4));
        assert_eq!((rows.blocks, rows.skipped_samples), (80, 1));
        assert_eq!(prompts.figures.acceptance_length, 2.5);
        assert_eq!((prompts.figures.acceptance_length_per_response, prompts.responses), (2.75, 8));
        let text = r#"{"step":5,"slot_accuracy":[null,0.4],"expected_accepted":1.4,"lr":null}"#;
        let line: MetricLine = serde_json::from_str(text).unwrap();
        assert_eq!(line.figures.accuracy_by_slot, [None, Some(0.4)]);
        assert_eq!(line.figures.expected_acceptance_length, Some(1.4));
        assert_eq!((line.lr, line.stream), (None, None));
    }

    #[test]
    fn tags_are_the_keys() {
        let rows = Some(HeldOutRows { figures: figures(), blocks: 4, skipped_samples: 0 });
        let line = ValidationLine { step: 3, rows, ..ValidationLine::default() };
        let expected = [
            ("validation/loss", 2.0),
            ("validation/accuracy_by_slot/01", 0.5),
            ("validation/head/gain", 0.25),
            ("validation/blocks", 4.0),
            ("validation/skipped_samples", 0.0),
        ];
        assert_eq!(line.scalars(), expected.map(|(tag, value)| (tag.to_owned(), value)));
    }
}
