//! `dflash bench`: arguments to one library call, and its report.

use dflash::args::{BenchArgs, BenchCommand, TrainStepArgs};
use dflash_train::bench::StepBench;

/// Runs the command.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    let BenchArgs { what: BenchCommand::TrainStep(args) } = args;
    train_step(args)
}

fn train_step(args: TrainStepArgs) -> anyhow::Result<()> {
    let TrainStepArgs {
        target,
        tokens,
        anchors,
        docs: documents,
        block: block_size,
        layers,
        captures,
        steps,
        warmup,
        device,
        seed,
        json,
    } = args;
    let device = super::train::device_choice(device);
    let bench = StepBench {
        target,
        tokens,
        anchors,
        documents,
        block_size,
        layers,
        captures,
        steps,
        warmup,
        device,
        seed,
    };
    let report = bench.run()?;
    if json {
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
