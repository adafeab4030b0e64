//! Results of `dflash eval`, stored with the draft: `evaluations.json` in a checkpoint of a run.
//! Each report identifies its weights by a digest, so that results are never shown for another
//! draft.

use std::fmt::{self, Display, Formatter};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use dflash_identity::TargetIdentity;
use dflash_settings::Thinking;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{AcceptanceFigures, Checkpoint, Error, RunDir, served};

/// The keys that identify a measurement: of two reports that agree in them, the later one counts.
const SAME: [&str; 8] = [
    "prompts",
    "responses",
    "max_new_tokens",
    "temperature",
    "thinking",
    "concurrency",
    "device",
    "target_identity",
];
const WEIGHTS: &str = "draft_weights";

/// The published part of an evaluation of one drafter on one set of prompts. Values that reports of
/// earlier releases lack are none or zero.
#[expect(missing_docs, reason = "docs/eval.md describes the keys of a report")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    #[serde(default)]
    pub draft_weights: Option<String>,
    #[serde(default)]
    pub target_identity: Option<TargetIdentity>,
    pub prompts: PathBuf,
    pub responses: usize,
    pub tokens: usize,
    pub max_new_tokens: usize,
    #[serde(flatten)]
    pub mode: EvalMode,
    pub block_size: usize,
    pub device: String,
    #[serde(flatten)]
    pub acceptance: AcceptanceFigures,
    pub tokens_per_second: Rates,
    pub lossless: Option<Identical>,
}

/// How answers were generated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EvalMode {
    /// 0 for greedy decoding.
    pub temperature: f64,
    /// The chat template's `enable_thinking`.
    #[serde(default)]
    pub thinking: Thinking,
    /// Concurrency.
    #[serde(default = "one_at_a_time")]
    pub concurrency: usize,
}

/// Tokens per second, prompts included.
#[expect(missing_docs, reason = "docs/eval.md describes the keys of a report")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    pub speculative: f64,
    pub plain: f64,
    pub speed_up: f64,
    /// Standard error of the speed-up; `None` if it was not measurable, and in reports of earlier
    /// releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed_up_error: Option<f64>,
}

/// How many answers equal those of plain greedy decoding.
#[expect(missing_docs, reason = "docs/eval.md describes the keys of a report")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Identical {
    pub responses: usize,
    pub identical: usize,
    pub ties: Vec<Value>,
    pub failures: Vec<Value>,
}

impl Default for EvalMode {
    fn default() -> Self {
        Self { temperature: 0.0, thinking: Thinking::Auto, concurrency: one_at_a_time() }
    }
}

impl Display for EvalMode {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.temperature {
            0.0 => write!(f, "greedy")?,
            temperature => write!(f, "temperature {temperature}")?,
        }
        match self.thinking {
            Thinking::Auto => {}
            Thinking::On => write!(f, ", thinking")?,
            Thinking::Off => write!(f, ", not thinking")?,
        }
        match self.concurrency {
            1 => Ok(()),
            many => write!(f, ", {many} at a time"),
        }
    }
}

impl Evaluation {
    /// The reports in `path`: the output of `dflash eval --json`, or a checkpoint's
    /// `evaluations.json`.
    ///
    /// # Errors
    /// An unreadable file, or one with other contents.
    pub fn read(path: &Path) -> Result<Vec<Self>, Error> {
        let bytes = std::fs::read(path).map_err(dflash_io::Error::io("read", path))?;
        let reports = reports(&bytes).and_then(|reports| {
            reports.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()
        });
        reports.map_err(|source| Error::Evaluation { path: path.into(), source })
    }
}

impl Checkpoint {
    /// The file with its evaluations.
    pub const EVALUATIONS: &str = "evaluations.json";

    /// The checkpoint in `dir`, if one of our runs made it.
    ///
    /// # Errors
    /// An unreadable directory.
    pub fn of_run(dir: &Path) -> Result<Option<Self>, Error> {
        let Some(run) = served::parent_run(dir)? else { return Ok(None) };
        let found = run.checkpoints()?.into_iter().find(|it| it.dir.file_name() == dir.file_name());
        Ok(found.filter(Self::has_our_name))
    }

    /// Its run.
    pub fn run(&self) -> RunDir {
        RunDir::at(self.dir.parent().unwrap_or(Path::new(".")))
    }

    /// Its evaluations; empty if there are none.
    ///
    /// # Errors
    /// As [`Evaluation::read`].
    pub fn evaluations(&self) -> Result<Vec<Evaluation>, Error> {
        let path = self.dir.join(Self::EVALUATIONS);
        if path.is_file() { Evaluation::read(&path) } else { Ok(Vec::new()) }
    }

    /// Adds an evaluation, replacing those of the same prompts and settings or of other weights.
    ///
    /// # Errors
    /// A file that cannot be written, or has other contents.
    pub fn keep_evaluation(&self, evaluation: &Evaluation) -> Result<(), Error> {
        let report = serde_json::to_value(evaluation).expect("it holds numbers and strings");
        let path = self.dir.join(Self::EVALUATIONS);
        let mut kept = match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            bytes => {
                let bytes = bytes.map_err(dflash_io::Error::io("read", &path))?;
                let fault = |source| Error::Evaluation { path: path.clone(), source };
                reports(&bytes).map_err(fault)?
            }
        };
        kept.retain(|other| {
            let is_same = SAME.iter().all(|&key| other.get(key) == report.get(key));
            other.get(WEIGHTS) == report.get(WEIGHTS) && !is_same
        });
        kept.push(report);
        let text = serde_json::to_vec_pretty(&kept).expect("JSON prints");
        Ok(dflash_io::write_bytes(&path, &text)?)
    }
}

/// The reports of a checkpoint, those of a report, or a report of an earlier release.
fn reports(bytes: &[u8]) -> serde_json::Result<Vec<Value>> {
    match serde_json::from_slice(bytes)? {
        Value::Array(reports) => Ok(reports),
        mut report => match report.get_mut("evaluations").map(Value::take) {
            Some(evaluations) => serde_json::from_value(evaluations),
            None => Ok(vec![report]),
        },
    }
}

/// The default for reports of earlier releases.
fn one_at_a_time() -> usize {
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(prompts: &str, weights: &str, length: f64) -> Evaluation {
        let mut report = Evaluation { prompts: prompts.into(), ..Evaluation::default() };
        report.draft_weights = Some(weights.to_owned());
        report.acceptance.acceptance_length = length;
        report
    }

    fn kept(checkpoint: &Checkpoint) -> Vec<(String, f64)> {
        let found = checkpoint.evaluations().unwrap();
        let of =
            |it: Evaluation| (it.prompts.display().to_string(), it.acceptance.acceptance_length);
        found.into_iter().map(of).collect()
    }

    #[test]
    fn a_report_replaces_its_like_and_those_of_other_weights() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::at(dir.path(), 7);
        std::fs::create_dir(&checkpoint.dir).unwrap();
        assert_eq!(kept(&checkpoint), []);
        let keep = |report: Evaluation| checkpoint.keep_evaluation(&report).unwrap();
        keep(report("a", "1", 2.0));
        keep(report("b", "1", 3.0));
        keep(report("a", "1", 2.5));
        assert_eq!(kept(&checkpoint), [("b".to_owned(), 3.0), ("a".to_owned(), 2.5)]);
        keep(report("c", "2", 4.0));
        assert_eq!(kept(&checkpoint), [("c".to_owned(), 4.0)]);
        let path = checkpoint.dir.join(Checkpoint::EVALUATIONS);
        std::fs::write(&path, "{torn").unwrap();
        let refused = checkpoint.keep_evaluation(&report("a", "1", 2.0)).unwrap_err().to_string();
        assert!(refused.contains("evaluations.json is not a report of `dflash eval`"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{torn");
    }

    #[test]
    fn a_file_is_one_report_or_several_or_one_of_several_drafters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("eval.json");
        let read = |text: &serde_json::Value| {
            std::fs::write(&path, text.to_string()).unwrap();
            let found = Evaluation::read(&path).unwrap();
            found.into_iter().map(|it| (it.prompts, it.mode.concurrency)).collect::<Vec<_>>()
        };
        let mut earlier = serde_json::to_value(report("a", "1", 2.0)).unwrap();
        let _ = earlier.as_object_mut().unwrap().remove("concurrency");
        let both = [report("a", "1", 2.0), report("b", "2", 2.0)];
        assert_eq!(read(&earlier), [("a".into(), 1)]);
        assert_eq!(read(&serde_json::json!(both)), [("a".into(), 1), ("b".into(), 1)]);
        let whole = serde_json::json!({"prompts": "a, b", "evaluations": both});
        assert_eq!(read(&whole), [("a".into(), 1), ("b".into(), 1)]);
    }

    #[test]
    fn only_a_run_s_checkpoint_keeps_reports() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("config.json"), "{}").unwrap();
            path
        };
        let (ours, theirs) = (place("run/step-000007"), place("run/step-7"));
        let export = place("export");
        let found = |path: &Path| Checkpoint::of_run(path).unwrap().map(|it| it.step);
        assert_eq!((found(&ours), found(&theirs), found(&export)), (Some(7), None, None));
        assert_eq!(found(&ours.join("")), Some(7));
    }
}
