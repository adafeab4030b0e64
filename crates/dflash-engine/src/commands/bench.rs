//! `dflash bench`: settings to one library call, and its report.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_decode::bench_decode;
use dflash_hub::{Hub, Part};
use dflash_model::target::TargetFacts;
use dflash_settings::{BenchDecodeSettings, BenchSettings, BenchSubject, TrainStepSettings};
use dflash_train::bench;

use super::{described, draft};

/// Runs the command.
pub(crate) fn run(settings: &BenchSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    match &settings.subject {
        BenchSubject::TrainStep(settings) => train_step(settings, stop),
        BenchSubject::Decode(settings) => decode(settings, stop),
    }
}

fn train_step(settings: &TrainStepSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, Part::Head, stop)?;
    let described = described::described(settings.target_spec.as_deref(), None)?;
    let target = TargetFacts::load(&target_dir, described.as_ref())?;
    let report = bench::train_step(settings, (&target_dir, &target))?;
    let TrainStepSettings { steps, warmup, json, .. } = settings;
    if *json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!("step         {:.1} ms (median of {steps})", report.step_ms);
    println!("slots        {:.0} per second ({} a step)", report.slots_per_s, report.slots);
    println!("useful work  {:.4} TFLOP/s", report.tflops);
    println!("peak memory  {:.0} MiB", report.peak_mib);
    println!("loss         {:.4} nats after {} steps", report.loss, warmup + steps);
    println!("logits       at most {} MiB at a time", report.loss_chunk_mib);
    println!("parameters   {:.2} M on {}", report.params_m, report.device);
    Ok(())
}

fn decode(settings: &BenchDecodeSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, Part::Target, stop)?;
    let draft_dir = draft::find(&settings.draft, stop)?;
    let report = bench_decode(settings, (&target_dir, &draft_dir), stop)?;
    if settings.json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    let (plain_ms, step_ms) = (report.plain_token_ms, report.step_ms);
    println!("plain        {:.0} tokens/s, {plain_ms:.3} ms a token", report.plain);
    println!("speculative  {:.0} tokens/s, {step_ms:.3} ms a step", report.speculative);
    println!("auto         {:.0} tokens/s, its length chosen step by step", report.auto);
    println!("tau          {:.3} tokens a step", report.acceptance_length);
    println!("step cost    {:.2} plain tokens", report.step_cost);
    println!("efficiency   {:.2} of tau x plain", report.efficiency);
    println!(
        "answers      {} of {} identical, {} tokens",
        report.identical, report.answers, report.tokens
    );
    println!("device       {}", report.device);
    Ok(())
}
