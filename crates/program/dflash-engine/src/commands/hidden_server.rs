//! `dflash hidden-server`: passes the settings to the library, or launches a target's ranks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use dflash_dist::{LaunchConfig, Role, WorkerEnv, launch};
use dflash_hidden_server::{Loader, Ready, TargetFeaturizer, follow, grid, serve};
use dflash_hub::{Hub, ModelPart};
use dflash_io::say;
use dflash_settings::{Device, HiddenServerSettings, Invalid};
use dflash_target::TargetConfig;
use dflash_tensor::gpus_for;

pub(crate) fn run(settings: &HiddenServerSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let dir = Hub::from_env().model(&settings.target, ModelPart::Target, stop)?;
    let ranks = settings.parallel.ranks();
    if ranks == 1 {
        tracing::info!("loading {}", dir.display());
        let own = settings.clone();
        let load = move || Ok(Box::new(TargetFeaturizer::load(&dir, &own)?) as _);
        return listen(settings, Box::new(load), stop);
    }
    match Role::from_env(Some(ranks), true)? {
        Role::Worker(env) => rank(settings, &dir, env, stop),
        _ => start_ranks(settings, &dir, stop),
    }
}

fn listen(
    settings: &HiddenServerSettings,
    load: Loader,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<()> {
    // Not a log line: it must be visible at any log level.
    serve(settings, load, stop, |ready: &Ready| say(format!("dflash hidden-server {ready}")))?;
    Ok(())
}

/// Runs one of several ranks: rank 0 answers requests, the others only compute.
fn rank(
    settings: &HiddenServerSettings,
    dir: &Path,
    env: WorkerEnv,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<()> {
    if env.world_size != settings.parallel.ranks() {
        let expected = format!(
            "--pipeline times --tensor-parallel-size is {}; this command starts the processes itself",
            settings.parallel.ranks()
        );
        return Err(Invalid::new("WORLD_SIZE", env.world_size, expected).into());
    }
    if env.rank > 0 {
        return Ok(follow(dir, settings, &env)?);
    }
    let (own, dir) = (settings.clone(), dir.to_owned());
    let load = move || Ok(Box::new(TargetFeaturizer::lead(&dir, &own, &env)?) as _);
    listen(settings, Box::new(load), stop)
}

/// Starts all ranks and waits for them, unless the target cannot be divided.
fn start_ranks(
    settings: &HiddenServerSettings,
    dir: &Path,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<()> {
    let ranks = settings.parallel.ranks();
    grid(settings.parallel).check(&TargetConfig::load(dir)?)?;
    check_gpus(settings.device, ranks)?;
    settings.check_port_file()?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let arguments = std::env::args_os().skip(1).collect();
    let config = LaunchConfig {
        // The model has been fetched: all ranks use that copy and do not query the Hub again.
        env: vec![("HF_HUB_OFFLINE".into(), "1".into())],
        ..LaunchConfig::new(program, arguments, ranks)
    };
    tracing::info!("starting {ranks} processes for {}", dir.display());
    launch(&config, stop)?;
    Ok(())
}

/// Refuses to let ranks share a GPU: each needs the whole memory of one.
fn check_gpus(device: Device, ranks: usize) -> Result<(), Invalid> {
    let Some(gpus) = gpus_for(device)?.filter(|&gpus| ranks > gpus) else { return Ok(()) };
    let expected = format!(
        "--pipeline times --tensor-parallel-size is {ranks}, and libtorch sees {gpus} CUDA devices \
         here; lower them, or pass --device cpu"
    );
    Err(Invalid::new("device", device, expected))
}
