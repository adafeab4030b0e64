//! `dflash eval`: arguments to settings to one library call.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::args::EvalArgs;
use dflash_decode::{EvalConfig, Sampling, evaluate};
use dflash_model::target::TargetOptions;

/// Runs the command.
pub(crate) fn run(args: EvalArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let EvalArgs {
        target,
        draft,
        prompts,
        max_new_tokens,
        limit,
        json,
        temperature,
        seed,
        tie_tolerance,
    } = args;
    let sampling = if temperature == 0.0 {
        Sampling::Greedy
    } else {
        Sampling::Temperature { temperature, seed }
    };
    let options = TargetOptions::default();
    let config = EvalConfig {
        target,
        draft,
        prompts,
        max_new_tokens,
        limit,
        json,
        sampling,
        tie_tolerance,
        options,
    };
    let report = evaluate(&config, stop)?;
    write!(std::io::stdout(), "{report}")?;
    Ok(report.check()?)
}
