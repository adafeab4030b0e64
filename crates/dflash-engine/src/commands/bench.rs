//! `dflash bench`: settings to one library call, and its report.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_hub::{Hub, Part};
use dflash_settings::{BenchSettings, BenchSubject, TrainStepSettings};
use dflash_train::bench;

/// Runs the command.
pub(crate) fn run(settings: &BenchSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    match &settings.subject {
        BenchSubject::TrainStep(settings) => train_step(settings, stop),
    }
}

fn train_step(settings: &TrainStepSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, Part::Target, stop)?;
    let report = bench::train_step(settings, &target_dir)?;
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
    println!("parameters   {:.2} M on {}", report.params_m, report.device);
    Ok(())
}
