//! `dflash bench`: passes the settings to the library and prints its report.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_decode::{bench_decode, bench_target};
use dflash_hub::{Hub, ModelPart};
use dflash_settings::{
    BenchDecodeSettings, BenchSettings, BenchSubject, BenchTargetSettings, TrainStepSettings,
};
use dflash_target::TargetFacts;
use dflash_train::bench::{self, Measured, MeasuredFlash, MeasuredProduct};

use super::{described, draft};

pub(crate) fn run(settings: &BenchSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    match &settings.subject {
        BenchSubject::TrainStep(settings) => train_step(settings, stop),
        BenchSubject::Decode(settings) => decode(settings, stop),
        BenchSubject::Target(settings) => target(settings, stop),
    }
}

fn train_step(settings: &TrainStepSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Head, stop)?;
    let described = described::described(settings.target_spec.as_deref(), None)?;
    let target = TargetFacts::load(&target_dir, described.as_ref())?;
    let report = bench::train_step(settings, &target_dir, &target)?;
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
    for (part, ms) in report.parts_ms.iter().flatten() {
        println!("  {part:<11}{ms:.1} ms of one more step, by the GPU's clock");
    }
    if let Some(measured) = &report.measured {
        show_measured(measured);
    }
    println!("parameters   {:.2} M on {}", report.params_m, report.device);
    if let Some(level) = &report.cpu_level {
        println!("level        {level} (CPU instructions)");
    }
    Ok(())
}

fn show_measured(measured: &Measured) {
    for MeasuredProduct { part, name, rows, inputs, outputs, count, ms, tflops, share } in
        &measured.products
    {
        let share = share.map_or_else(String::new, |share| format!(", {share:.2} of the peak"));
        println!(
            "  {part:<12}{name}: {rows} x {inputs} x {outputs}, {count} a step, {ms:.3} ms, \
             {tflops:.3} TFLOP/s{share}"
        );
    }
    if let Some(flash) = &measured.flash {
        let MeasuredFlash { forward_tflops, backward_tflops } = flash;
        println!(
            "  attention   {forward_tflops:.1} TFLOP/s forward, {backward_tflops:.1} backward"
        );
    }
    println!("  a copy      {:.1} GB/s, read and written", measured.copy_gb_s);
    println!("  an operator {:.2} us of the host", measured.operator_us);
}

fn decode(settings: &BenchDecodeSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Target, stop)?;
    let draft_dir = draft::find(&settings.draft, stop)?;
    let report = bench_decode(settings, &target_dir, &draft_dir, stop)?;
    if settings.json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    let (plain_ms, step_ms) = (report.plain_token_ms, report.step_ms);
    println!("plain        {:.0} tokens/s, {plain_ms:.3} ms a token", report.plain);
    println!("speculative  {:.0} tokens/s, {step_ms:.3} ms a step", report.speculative);
    println!("auto         {:.0} tokens/s, length chosen in each step", report.auto);
    println!("tau          {:.3} tokens a step", report.acceptance_length);
    println!("step cost    {:.2} plain tokens", report.step_cost);
    println!("efficiency   {:.2} of tau x plain", report.efficiency);
    println!(
        "answers      {} of {} identical, {} tokens",
        report.identical, report.answers, report.tokens
    );
    println!("device       {}", report.device);
    if let Some(level) = &report.cpu_level {
        println!("level        {level} (CPU instructions)");
    }
    Ok(())
}

fn target(settings: &BenchTargetSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let dir = Hub::from_env().model(&settings.target, ModelPart::Target, stop)?;
    let report = bench_target(settings, &dir, stop)?;
    if settings.json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    let (resident, peak, before) = (report.resident_mib, report.peak_mib, report.before_mib);
    println!("load         {:.1} s", report.load_s);
    println!("memory       {resident:.0} MiB, {before:.0} before loading, {peak:.0} at most");
    println!("weights      {:.0} MiB read by a step", report.weights_mib);
    println!("plain read   {:.1} GB/s", report.read_gb_per_s);
    for step in &report.steps {
        let (ms, share) = (step.ms, step.ms / step.floor_ms);
        let (rows, context) = (report.rows, step.context);
        println!(
            "step         {rows} rows behind {context}: {ms:.3} ms, {share:.2} of a plain read"
        );
    }
    if report.passes_alone > 0 {
        println!(
            "{} passes ran on one thread, because the others were kept from running",
            report.passes_alone
        );
    }
    for prompt in &report.prompts {
        let (tokens, ms) = (prompt.tokens, prompt.ms);
        println!("prompt       {tokens} tokens: {ms:.2} ms, {:.3} each", ms / tokens as f64);
    }
    println!("device       {}", report.device);
    println!("level        {} (CPU instructions)", report.cpu_level);
    Ok(())
}
