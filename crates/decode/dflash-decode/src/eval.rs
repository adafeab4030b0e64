//! Evaluates drafts: speculative decoding against plain decoding of the same prompts.
//!
//! At concurrency 1, modes alternate answer by answer and in changing order, so that warm-up and
//! machine load affect them equally. At higher concurrency they alternate by parts of a set.

mod drafts;
mod measurement;
mod together;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use dflash_chat::ChatTokenizer;
use dflash_eval::sets::{PromptSet, SetRows, locate};
use dflash_eval::{EvalMode, EvalReport, Facts, Measured, Memory, SetFacts, check_outputs, write};
use dflash_hub::Hub;
use dflash_identity::TargetIdentity;
use dflash_io::{Progress, Unit, say};
use dflash_kernels::CpuLevel;
use dflash_settings::{EvalSettings, Thinking};
use dflash_target::{Target, TargetConfig, TargetOptions};
use dflash_tensor::{DeviceKind, device_name, kind_name, peak_resident_mib, place};
use tch::{Device, Kind};

use crate::Error;
use crate::limits::Limits;
use crate::models::DraftSource;
use crate::prompts::{Prompt, Room, usable_rows};
use crate::sampling::Sampling;

use drafts::Drafts;
use measurement::Measurement;
use together::Together;

/// Decodes every prompt plainly and with each draft, and reports. Writes the requested files, and
/// stores each draft's results with its checkpoint if it is a run's.
///
/// [`EvalReport::check`] on the report checks that the texts agree.
///
/// # Errors
/// Models or prompts that cannot be loaded or do not match; [`Error::Interrupted`].
pub fn evaluate(
    settings: &EvalSettings,
    target_dir: &Path,
    sources: &[DraftSource],
    stop: &AtomicBool,
) -> Result<EvalReport, Error> {
    check_outputs(settings)?;
    let sets = read_sets(settings, stop)?;
    sets.iter().for_each(|(set, rows)| rows.say_unread_columns(&set.title));
    let DeviceKind { device, kind: dtype } = place(settings.device, settings.dtype, 0)?;
    let target = Target::load(target_dir, &TargetOptions { device, dtype })?;
    let name = settings.target.as_deref().unwrap_or_default();
    let identity = TargetIdentity::read(target_dir, name)?;
    let drafts = Drafts::load(settings, &target, &identity, sources)?;
    let asked = ask(settings, target_dir, target.config(), &sets)?;
    let results = measure(settings, &target, &drafts, &asked, stop)?;
    let cpu_level = (device == Device::Cpu).then(dflash_kernels::cpu_level);
    let facts = Facts {
        target: target_dir.display().to_string(),
        target_identity: Some(identity),
        drafts: drafts.facts(),
        sets: sets.iter().map(|(set, rows)| set_facts(set, rows, &asked)).collect(),
        max_new_tokens: settings.max_new_tokens,
        seed: settings.seed,
        device: described(device, dtype, cpu_level),
        cpu_level: cpu_level.map(|level| level.to_string()),
        memory: peak_memory(device),
        ..Facts::default()
    };
    let mut report = EvalReport::new(facts, results);
    // The report is written even if it shares nothing with the baseline.
    let compared = settings.baseline.as_ref().map_or(Ok(()), |baseline| report.compare(baseline));
    write(&report, settings)?;
    if !settings.no_record {
        drafts.keep_beside(&report.evaluations);
    }
    compared?;
    Ok(report)
}

/// Device, precision and CPU threads: `cpu (avx2), float32, 2 threads`.
fn described(device: Device, dtype: Kind, cpu_level: Option<CpuLevel>) -> String {
    let level = cpu_level.map_or_else(String::new, |level| format!(" ({level})"));
    let (device, dtype) = (device_name(device), kind_name(dtype));
    format!("{device}{level}, {dtype}, {} threads", tch::get_num_threads())
}

fn read_sets(
    settings: &EvalSettings,
    stop: &AtomicBool,
) -> Result<Vec<(PromptSet, SetRows)>, Error> {
    let hub = Hub::from_env();
    let read = |set: PromptSet| {
        let rows = set.rows(&hub, settings.limit, stop)?;
        Ok((set, rows))
    };
    locate(&settings.prompts)?.into_iter().map(read).collect()
}

/// A turn of a row: each is a prompt of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RowTurn {
    row: usize,
    turn: usize,
}

/// The prompts of a set in one thinking mode.
struct Asked<'a> {
    set: &'a str,
    thinking: Thinking,
    tokenizer: std::rc::Rc<ChatTokenizer>,
    prompts: Vec<Prompt>,
    skipped: usize,
}

/// Renders all prompts before the first is answered, so that errors show early.
fn ask<'a>(
    settings: &EvalSettings,
    target_dir: &Path,
    config: &TargetConfig,
    sets: &'a [(PromptSet, SetRows)],
) -> Result<Vec<Asked<'a>>, Error> {
    let mut asked = Vec::new();
    for &thinking in &settings.thinking {
        let tokenizer = std::rc::Rc::new(tokenizer(target_dir, thinking)?);
        for (set, rows) in sets {
            let room = Room { config, max_new: settings.max_new_tokens };
            let (mut prompts, skipped) = usable_rows(&rows.rows, &rows.source, &tokenizer, room)?;
            if settings.first_turn {
                prompts = prompts.into_iter().map(Prompt::first_turn).collect();
            }
            let tokenizer = std::rc::Rc::clone(&tokenizer);
            asked.push(Asked { set: &set.name, thinking, tokenizer, prompts, skipped });
        }
    }
    Ok(asked)
}

fn tokenizer(target_dir: &Path, thinking: Thinking) -> Result<ChatTokenizer, Error> {
    const VARIABLE: &str = "enable_thinking";
    let mut tokenizer = ChatTokenizer::load(target_dir)?;
    if let Some(enabled) = thinking.template_variable() {
        let knows = |(_, source): &(String, String)| source.contains(VARIABLE);
        if !tokenizer.template_sources().iter().any(knows) {
            say(format!(
                "the target's chat template does not use {VARIABLE}: --thinking has no effect"
            ));
        }
        tokenizer.extend_template_variables([(VARIABLE.to_owned(), enabled.into())])?;
    }
    Ok(tokenizer)
}

/// Runs all modes: each thinking mode, set and temperature.
fn measure(
    settings: &EvalSettings,
    target: &Target,
    drafts: &Drafts,
    asked: &[Asked<'_>],
    stop: &AtomicBool,
) -> Result<Vec<Measured>, Error> {
    let mut results = Vec::new();
    for asked in asked {
        for &temperature in &settings.temperature {
            for &concurrency in &settings.concurrency {
                let mode = EvalMode { temperature, thinking: asked.thinking, concurrency };
                let limits =
                    Limits::new(target.config(), &asked.tokenizer, settings.max_new_tokens);
                results.extend(match concurrency {
                    1 => one_by_one(settings, target, drafts, asked, mode, limits, stop)?,
                    _ => {
                        let together = Together { settings, target, drafts, asked, limits, mode };
                        several(&together, stop)?
                    }
                });
            }
        }
    }
    Ok(results)
}

/// Answers a set prompt by prompt, each plainly and with every draft before the next.
fn one_by_one(
    settings: &EvalSettings,
    target: &Target,
    drafts: &Drafts,
    asked: &Asked<'_>,
    mode: EvalMode,
    limits: Limits,
    stop: &AtomicBool,
) -> Result<Vec<Measured>, Error> {
    let sampling = Sampling::at(mode.temperature);
    let mut measurement = Measurement::new(settings, target, drafts, sampling, limits)?;
    measurement.warm_up(&asked.prompts[0], stop)?;
    let mut progress = Progress::new("eval", Unit::Items, asked.prompts.len() as u64);
    for (row, prompt) in asked.prompts.iter().enumerate() {
        measurement.answer_row(row, prompt, &asked.tokenizer, stop)?;
        progress.update(row as u64 + 1, format!("{} {mode}: {measurement}", asked.set));
    }
    Ok(measurement.finish(asked.set, mode))
}

/// Answers a set several prompts at a time, plainly and with each draft.
fn several(together: &Together<'_>, stop: &AtomicBool) -> Result<Vec<Measured>, Error> {
    let rounds = 1 + together.drafts.modes().len();
    let rows = together.asked.prompts.len() * rounds;
    let mut progress = Progress::new("eval", Unit::Items, rows as u64);
    let mut answers = 0;
    together.measure(stop, || {
        answers += 1;
        // Later turns also count as answers; their number is not known in advance.
        let shown = answers.min(rows as u64);
        progress
            .update(shown, format!("{} {}: {answers} answers", together.asked.set, together.mode));
    })
}

/// Seed of a row's turn, so that answers use different random numbers.
fn seed_of(seed: u64, RowTurn { row, turn }: RowTurn) -> u64 {
    seed.wrapping_add(((row as u64) << 16) + turn as u64)
}

fn set_facts(set: &PromptSet, rows: &SetRows, asked: &[Asked<'_>]) -> SetFacts {
    let skipped = asked.iter().find(|asked| asked.set == set.name).map(|asked| asked.skipped);
    SetFacts {
        name: set.name.clone(),
        title: set.title.clone(),
        source: rows.source.clone(),
        revision: rows.revision.clone(),
        rows: rows.rows.len(),
        skipped: skipped.unwrap_or_default(),
        failed: 0,
    }
}

/// Peak memory since the process started.
fn peak_memory(device: Device) -> Memory {
    const MIB: f64 = 1024.0 * 1024.0;
    let device_bytes = match device {
        Device::Cuda(index) => dflash_torch_sys::peak_device_bytes(index).ok(),
        _ => None,
    };
    Memory {
        process_mib: peak_resident_mib(),
        device_mib: device_bytes.map(|bytes| bytes as f64 / MIB),
    }
}
