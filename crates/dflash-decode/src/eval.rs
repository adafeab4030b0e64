//! Measuring drafts: real speculative decoding beside plain decoding of the same prompts.
//!
//! All ways to decode alternate answer by answer, and which goes first alternates too, so that a
//! machine that warms up or is shared slows them alike.

mod drafts;
mod measurement;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use dflash_bench_sets::{PromptSet, Rows, locate};
use dflash_console::{Progress, Unit, say};
use dflash_evaluation::{EvalReport, Facts, Measured, Memory, SetFacts, Way, check_outputs, write};
use dflash_hub::Hub;
use dflash_model::target::{Target, TargetConfig, TargetOptions};
use dflash_model::{device_name, kind_name, place};
use dflash_settings::{EvalSettings, Thinking};
use dflash_text::ChatTokenizer;
use tch::Device;

use crate::Error;
use crate::plain::Limits;
use crate::prompts::{Prompt, usable_rows};
use crate::sampling::Sampler;

pub use drafts::DraftSource;
use drafts::Drafts;
use measurement::Measurement;

/// Decodes every prompt plainly and with each draft, and reports. Writes the files that are asked for.
///
/// The report's [`EvalReport::check`] says whether the texts agree.
///
/// # Errors
/// Models or prompts that cannot be loaded or do not fit each other; [`Error::Interrupted`].
pub fn evaluate(
    settings: &EvalSettings,
    (target_dir, sources): (&Path, &[DraftSource]),
    stop: &AtomicBool,
) -> Result<EvalReport, Error> {
    check_outputs(settings)?;
    let sets = read_sets(settings, stop)?;
    let (device, dtype) = place(settings.device, settings.dtype, 0)?;
    let target = Target::load(target_dir, &TargetOptions { device, dtype })?;
    let drafts = Drafts::load(settings, (&target, target_dir), sources)?;
    let asked = ask(settings, (target_dir, target.config()), &sets)?;
    let results = measure(settings, (&target, &drafts), &asked, stop)?;
    let facts = Facts {
        target: target_dir.display().to_string(),
        drafts: drafts.facts(),
        sets: sets.iter().map(|(set, rows)| set_facts(set, rows, &asked)).collect(),
        max_new_tokens: settings.max_new_tokens,
        seed: settings.seed,
        device: format!(
            "{}, {}, {} threads",
            device_name(device),
            kind_name(dtype),
            tch::get_num_threads()
        ),
        memory: peak_memory(device),
        ..Facts::default()
    };
    let mut report = EvalReport::new(facts, results);
    if let Some(baseline) = &settings.baseline {
        report.compare(baseline)?;
    }
    write(&report, settings)?;
    Ok(report)
}

/// The sets that the settings name, with their rows.
fn read_sets(settings: &EvalSettings, stop: &AtomicBool) -> Result<Vec<(PromptSet, Rows)>, Error> {
    let hub = Hub::from_env();
    let read = |set: PromptSet| {
        let rows = set.rows(&hub, settings.limit, stop)?;
        Ok((set, rows))
    };
    locate(&settings.prompts)?.into_iter().map(read).collect()
}

/// The prompts of a set, as the target is asked in one mode of thinking.
struct Asked<'a> {
    set: &'a str,
    thinking: Thinking,
    tokenizer: std::rc::Rc<ChatTokenizer>,
    prompts: Vec<Prompt>,
    skipped: usize,
}

/// Renders all prompts before the first is answered: what is wrong with one is known early.
fn ask<'a>(
    settings: &EvalSettings,
    (target_dir, config): (&Path, &TargetConfig),
    sets: &'a [(PromptSet, Rows)],
) -> Result<Vec<Asked<'a>>, Error> {
    let mut asked = Vec::new();
    for &thinking in &settings.thinking {
        let tokenizer = std::rc::Rc::new(tokenizer(target_dir, thinking)?);
        for (set, rows) in sets {
            let room = (config, settings.max_new_tokens);
            let (mut prompts, skipped) = usable_rows((&rows.rows, &rows.source), &tokenizer, room)?;
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
                "the target's chat template does not ask for {VARIABLE}: --thinking changes nothing"
            ));
        }
        tokenizer.extend_template_variables([(VARIABLE.to_owned(), enabled.into())])?;
    }
    Ok(tokenizer)
}

/// Answers everything: each mode of thinking, each set in it, each temperature.
fn measure(
    settings: &EvalSettings,
    (target, drafts): (&Target, &Drafts),
    asked: &[Asked<'_>],
    stop: &AtomicBool,
) -> Result<Vec<Measured>, Error> {
    let rows: usize = asked.iter().map(|asked| asked.prompts.len()).sum();
    let total = rows * settings.temperature.len();
    let mut progress = Progress::new("eval", Unit::Items, total as u64);
    let (mut results, mut done) = (Vec::new(), 0);
    for asked in asked {
        for &temperature in &settings.temperature {
            let sampler = Sampler::new(temperature, settings.seed);
            let limits = Limits::new(target.config(), &asked.tokenizer, settings.max_new_tokens);
            let way = Way { temperature, thinking: asked.thinking, concurrency: 1 };
            let mut measurement = Measurement::new(settings, (target, drafts), (sampler, limits))?;
            measurement.warm_up(&asked.prompts[0], stop)?;
            for (row, prompt) in asked.prompts.iter().enumerate() {
                measurement.answer_row(row, prompt, &asked.tokenizer, stop)?;
                done += 1;
                progress.update(done, format!("{} {way}: {measurement}", asked.set));
            }
            results.extend(measurement.finish(asked.set, way, drafts));
        }
    }
    Ok(results)
}

fn set_facts(set: &PromptSet, rows: &Rows, asked: &[Asked<'_>]) -> SetFacts {
    let skipped = asked.iter().find(|asked| asked.set == set.name).map(|asked| asked.skipped);
    SetFacts {
        name: set.name.clone(),
        title: set.title.clone(),
        source: rows.source.clone(),
        revision: rows.revision.clone(),
        rows: rows.rows.len(),
        skipped: skipped.unwrap_or_default(),
    }
}

/// High-water marks since the process began.
fn peak_memory(device: Device) -> Memory {
    const MIB: f64 = 1024.0 * 1024.0;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    let device_bytes = match device {
        Device::Cuda(index) => dflash_torch_sys::peak_device_bytes(index).ok(),
        _ => None,
    };
    Memory {
        process_mib: kib.map(|kib| kib / 1024.0),
        device_mib: device_bytes.map(|bytes| bytes as f64 / MIB),
    }
}
