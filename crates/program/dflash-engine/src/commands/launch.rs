//! Launches the ranks of `dflash train`.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Context;
use dflash::{Ending, OnSignal, Signals};
use dflash_dist::{Error, Finished, LaunchConfig, Role, launch};
use dflash_settings::LaunchSettings;

/// Maximum number of ranks per core; more only compete with each other.
const RANKS_PER_CORE: usize = 4;
/// Number of ranks allowed on any machine.
const FEW_RANKS: usize = 8;

/// The launcher kills ranks this long before its own deadline, to report which ones it killed.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// Whether this process trains (alone or as a rank) or launches ranks.
pub(super) fn role(settings: &LaunchSettings) -> Result<Role, Error> {
    let needs_launcher = settings.nnodes != 1 || settings.max_restarts > 0;
    Role::from_env(settings.nproc, needs_launcher)
}

/// Configuration for launching `nproc` ranks on this machine.
pub(super) fn config(settings: &LaunchSettings, nproc: usize) -> anyhow::Result<LaunchConfig> {
    let nnodes = settings.nnodes;
    let node_rank = match settings.node_rank {
        Some(node_rank) => node_rank,
        // With a default, two machines could get the same rank.
        None if nnodes > 1 => return Err(Error::MissingFlag { flag: "--node-rank", nnodes }.into()),
        None => 0,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let config = LaunchConfig {
        // The launcher has fetched the models: ranks use that copy and do not query the Hub again.
        env: vec![("HF_HUB_OFFLINE".into(), "1".into())],
        nnodes,
        node_rank,
        rdzv_endpoint: settings.rdzv_endpoint.clone(),
        max_restarts: settings.max_restarts,
        join_timeout: Duration::from_secs(settings.join_timeout),
        ..LaunchConfig::new(program, arguments, nproc)
    };
    config.check()?;
    check_room(nproc)?;
    Ok(config)
}

/// Refuses more ranks than the machine can run: each holds the draft and its state.
fn check_room(nproc: usize) -> Result<(), Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = (RANKS_PER_CORE * cores).max(FEW_RANKS);
    if nproc <= most {
        return Ok(());
    }
    let expected = format!("1 to {most} on this machine of {cores} cores");
    Err(Error::BadLaunch { flag: "--nproc", value: nproc.to_string(), expected })
}

/// Launches the ranks and waits for them; after SIGTERM they have `grace` to save.
pub(super) fn start(
    config: LaunchConfig,
    grace: Duration,
    signals: &Signals,
) -> anyhow::Result<Ending> {
    let save_grace = grace - LAST_WORDS.min(grace / 10);
    let sigterm_is_success = signals.on_signal() == OnSignal::Save { sigterm_is_success: true };
    match launch(&LaunchConfig { save_grace, ..config }, signals.stop())? {
        // With --sigterm-is-success, stopped ranks also exit with 0.
        Finished::Completed if signals.received().is_some() && sigterm_is_success => {
            Ok(Ending::Stopped)
        }
        Finished::Completed => Ok(Ending::Complete),
        Finished::Stopped => {
            tracing::warn!("stopped; --resume continues");
            Ok(Ending::Stopped)
        }
    }
}
