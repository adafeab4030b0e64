//! `dflash plan`: arguments to one library call, and its table.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use dflash::args::{ComputeDtype, DeviceArg, OptimizerArg, PlanArgs, RowArgs};
use dflash_train::machine::gpu_name;
use dflash_train::plan::{PlanConfig, PlanData, PlanMachine, PlanState};

use super::train::{draft_shape, objective_settings, stored_draft, whole_epochs};

/// Runs the command; the plan goes to stdout.
pub(crate) fn run(args: PlanArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let json = args.json;
    let plan = settings(args, stop)?.plan()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&plan)?);
    } else {
        print!("{plan}");
    }
    Ok(())
}

fn settings(args: PlanArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<PlanConfig> {
    let PlanArgs {
        // both programs put it in place of the flags before this
        run: _,
        verifier_name_or_path: target,
        data_path,
        count,
        mean_length,
        nproc: ranks,
        device,
        gpu,
        tflops,
        validation_ratio,
        optimizer,
        ema_decay,
        zero,
        recompute,
        compute_dtype,
        window_mib,
        json: _,
        draft,
        rows,
        objective,
    } = args;
    let RowArgs {
        total_seq_len,
        anchors_per_sequence,
        max_anchors,
        gradient_accumulation_steps: accumulation,
        epochs,
        max_steps,
        seed,
    } = rows;
    let (_, stored) = stored_draft(&draft, stop)?;
    let draft = draft_shape(draft, &target, stored.as_ref())?;
    let objective = objective_settings(objective, draft.block_size)?;
    let machine = machine(device, gpu, (tflops, ranks));
    let on_gpu = machine.gpu;
    Ok(PlanConfig {
        target,
        data: data(data_path, count.zip(mean_length)),
        validation_ratio,
        machine,
        ranks,
        accumulation,
        epochs: whole_epochs(epochs, max_steps),
        max_steps,
        total_seq_len,
        anchors_per_sequence,
        max_anchors,
        seed,
        chunk_bytes: objective.chunk_bytes,
        window_bytes: window_mib.max(1) << 20,
        teacher: objective.needs_teacher(),
        state: PlanState {
            moments: if optimizer == OptimizerArg::Muon { 1 } else { 2 },
            averaged: ema_decay.is_some(),
            split: zero > 0,
            recompute,
            bf16: match compute_dtype {
                ComputeDtype::Auto => on_gpu,
                ComputeDtype::Float32 => false,
                ComputeDtype::Bfloat16 => true,
            },
        },
        draft,
    })
}

/// Documents that are described count more than a dataset, which a run file may name.
fn data(path: Option<std::path::PathBuf>, documents: Option<(usize, usize)>) -> PlanData {
    match (path, documents) {
        (_, Some((count, length))) => PlanData::Documents { count, length },
        (path, None) => PlanData::Dataset(path.expect("clap asks for one of them")),
    }
}

fn machine(
    device: DeviceArg,
    gpu: Option<String>,
    (tflops, ranks): (Option<f64>, usize),
) -> PlanMachine {
    let here = gpu_name();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    PlanMachine {
        gpu: match device {
            DeviceArg::Cpu => false,
            DeviceArg::Cuda => true,
            DeviceArg::Auto => gpu.is_some() || here.is_some(),
        },
        name: gpu.or(here),
        cores: (cores / ranks.max(1)).max(1),
        tflops,
    }
}
