//! Makes the demo's target from its settings.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use dflash_chat::ChatTokenizer;
use dflash_io::PendingDir;
use dflash_settings::{DemoTargetSettings, Device as Asked, Dtype};
use dflash_target::{Target, TargetConfig};
use dflash_tensor::{DeviceKind, place};
use serde_json::{Value, json};
use tch::Kind;

use crate::corpus::{Exchange, conversations, messages};
use crate::error::Error;
use crate::tokenizer::{self, END_ID, PAD_ID};
use crate::training::{self, Plan};
use crate::widen::widen;

/// Entries of the tokenizer: enough for the corpus's words.
const VOCAB_SIZE: usize = 1024;
/// Tokens of one training step.
const STEP_TOKENS: usize = 2048;
/// Shape of the target: deep enough for four auxiliary layers, and narrow.
const HIDDEN_SIZE: i64 = 128;
const LAYERS: usize = 8;

/// Progress while the demo's target is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    /// The corpus and the tokenizer have been made.
    Corpus {
        /// Conversations to train on.
        rows: usize,
        /// Entries of the tokenizer.
        vocabulary: usize,
    },
    /// The target is about to be trained.
    Target {
        /// Its weights.
        parameters: i64,
    },
    /// An optimizer step has been taken.
    Step {
        /// Steps done.
        step: usize,
        /// Total number of steps.
        steps: usize,
        /// Mean loss of the step's answers, in nats per token.
        loss: f64,
    },
}

/// The result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The target's directory.
    pub target: PathBuf,
    /// Whether everything was there already.
    pub kept: bool,
    /// The widened target's directory and the bytes of its weights, if one was requested.
    pub wide: Option<(PathBuf, u64)>,
}

/// Conversations to train on, one a line, as `messages`.
const CONVERSATIONS: &str = "conversations.jsonl";
/// Held-out conversations in the same form.
const PROMPTS: &str = "prompts.jsonl";

/// Makes corpus, tokenizer and target, or keeps those of an earlier run with the same settings. The
/// target's directory appears complete, and last.
///
/// # Errors
/// A directory made with other settings, an interrupt, or I/O.
pub fn run(
    config: &DemoTargetSettings,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(Event),
) -> Result<Summary, Error> {
    config.check()?;
    let target = config.output.join("target");
    let kept = is_made(config, &target)?;
    if !kept {
        make(config, &target, stop, observe)?;
    }
    let wide = config.widen_to.map(|megabytes| widened(config, &target, megabytes)).transpose()?;
    Ok(Summary { target, kept, wide })
}

/// The target widened to `megabytes` of weights.
fn widened(
    config: &DemoTargetSettings,
    target: &Path,
    megabytes: u64,
) -> Result<(PathBuf, u64), Error> {
    let dir = config.output.join("wide");
    let bytes = widen(target, &dir, megabytes * 1_000_000)?;
    Ok((dir, bytes))
}

/// Corpus, tokenizer and target.
fn make(
    config: &DemoTargetSettings,
    target: &Path,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(Event),
) -> Result<(), Error> {
    let corpus = conversations(config.rows + config.held_out, config.seed);
    let (rows, held_out) = corpus.split_at(config.rows);
    write_settings(config)?;
    write_rows(&config.output.join(CONVERSATIONS), rows)?;
    write_rows(&config.output.join(PROMPTS), held_out)?;
    make_target(config, target, rows, stop, observe)
}

/// Whether the target exists and was made with the same settings.
fn is_made(config: &DemoTargetSettings, target: &Path) -> Result<bool, Error> {
    let path = settings_path(config);
    let Ok(text) = fs::read_to_string(&path) else { return Ok(false) };
    match serde_json::from_str::<Value>(&text) {
        Ok(made) if made == decisive(config) => Ok(target.join("config.json").is_file()),
        _ => Err(Error::OtherSettings { path }),
    }
}

/// The settings that determine corpus and target.
fn decisive(config: &DemoTargetSettings) -> Value {
    let DemoTargetSettings { output: _, rows, held_out, steps, seed, widen_to: _ } = config;
    json!({ "rows": rows, "held_out": held_out, "steps": steps, "seed": seed })
}

fn settings_path(config: &DemoTargetSettings) -> PathBuf {
    config.output.join("settings.json")
}

fn write_settings(config: &DemoTargetSettings) -> Result<(), Error> {
    let dir = &config.output;
    fs::create_dir_all(dir).map_err(dflash_io::Error::io("create", dir))?;
    let text = format!("{:#}", decisive(config));
    Ok(dflash_io::write_bytes(&settings_path(config), text.as_bytes())?)
}

fn write_rows(path: &Path, rows: &[Vec<Exchange>]) -> Result<(), Error> {
    let line = |turns: &Vec<Exchange>| format!("{}\n", json!({ "messages": messages(turns) }));
    let text: String = rows.iter().map(line).collect();
    Ok(dflash_io::write_bytes(path, text.as_bytes())?)
}

fn make_target(
    config: &DemoTargetSettings,
    dir: &Path,
    rows: &[Vec<Exchange>],
    stop: &AtomicBool,
    observe: &mut dyn FnMut(Event),
) -> Result<(), Error> {
    let pending = PendingDir::create(dir)?;
    tokenizer::write(&tokenizer::train(rows, VOCAB_SIZE)?, pending.path())?;
    let tokenizer = ChatTokenizer::load(pending.path())?;
    observe(Event::Corpus { rows: rows.len(), vocabulary: tokenizer.len() });
    let documents = rows
        .iter()
        .map(|turns| training::document(&tokenizer, turns))
        .collect::<Result<Vec<_>, _>>()?;
    let shape = target_config(tokenizer.len());
    let DeviceKind { device, .. } = place(Asked::Auto, Dtype::Float32, 0)?;
    let target = Target::random(shape, config.seed.cast_signed(), device);
    let parameters = target.parameters().iter().map(|(_, tensor)| tensor.numel() as i64).sum();
    observe(Event::Target { parameters });
    let plan = Plan { steps: config.steps, tokens: STEP_TOKENS, seed: config.seed };
    training::train(&target, &documents, plan, stop, observe)?;
    target.save(pending.path(), Kind::BFloat16)?;
    Ok(pending.commit()?)
}

fn target_config(vocabulary: usize) -> TargetConfig {
    TargetConfig {
        eos_token_ids: vec![END_ID],
        pad_token_id: Some(PAD_ID),
        ..TargetConfig::qwen3(HIDDEN_SIZE, LAYERS, vocabulary as i64)
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn config(dir: &Path) -> DemoTargetSettings {
        let output = dir.join("demo");
        DemoTargetSettings { output, rows: 40, held_out: 3, steps: 2, seed: 1, widen_to: None }
    }

    fn run_it(config: &DemoTargetSettings) -> Result<Summary, Error> {
        run(config, &AtomicBool::new(false), &mut |_| ())
    }

    #[test]
    fn the_target_loads_and_a_second_run_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let made = run_it(&config(dir.path())).unwrap();
        let wider = DemoTargetSettings { widen_to: Some(20), ..config(dir.path()) };
        let again = run_it(&wider).unwrap();
        assert!(!made.kept && made.wide.is_none() && again.kept);
        let (wide, bytes) = again.wide.unwrap();
        assert!(
            wide.join("tokenizer.json").is_file() && (19_000_000..=20_000_000).contains(&bytes)
        );
        let options = dflash_target::TargetOptions { device: Device::Cpu, dtype: Kind::Float };
        let target = Target::load(&made.target, &options).unwrap();
        assert_eq!((target.num_layers(), target.hidden_size()), (LAYERS, HIDDEN_SIZE));
        assert_eq!(target.config().eos_token_ids, [END_ID]);
    }

    #[test]
    fn rows_and_prompts_are_apart() {
        let dir = tempfile::tempdir().unwrap();
        run_it(&config(dir.path())).unwrap();
        let lines =
            |name| fs::read_to_string(dir.path().join("demo").join(name)).unwrap().lines().count();
        assert_eq!((lines(CONVERSATIONS), lines(PROMPTS)), (40, 3));
    }

    #[test]
    fn other_settings_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        run_it(&config(dir.path())).unwrap();
        let other = DemoTargetSettings { rows: 41, ..config(dir.path()) };
        assert!(matches!(run_it(&other), Err(Error::OtherSettings { .. })));
    }

    #[test]
    fn an_interrupt_leaves_no_target_and_can_be_continued() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let stopped = run(&config, &AtomicBool::new(true), &mut |_| ());
        assert!(matches!(stopped, Err(Error::Interrupted { step: 0, steps: 2 })));
        assert!(!config.output.join("target").exists());
        assert!(!run_it(&config).unwrap().kept);
    }

    #[test]
    fn nothing_to_do_is_an_error_that_names_the_flag() {
        let dir = tempfile::tempdir().unwrap();
        let error = run_it(&DemoTargetSettings { held_out: 0, ..config(dir.path()) }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--held-out is 0, but it must be at least 1 and at most 1000000"
        );
    }
}
