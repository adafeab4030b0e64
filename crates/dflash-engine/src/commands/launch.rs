//! The ranks of `dflash train`: flags to a launch.

use std::ffi::OsString;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use dflash::args::{BackendArg, LaunchArgs};
use dflash_dist::{Backend, Error, Finished, LaunchConfig, LaunchWish, launch};

/// By which ranks that are started again find what the ones before them have saved.
const RESUME: &str = "--resume";

/// The launcher kills ranks so much before its own time is over, to say which it had to kill.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// What the flags wish for.
pub(super) fn wish(args: &LaunchArgs) -> LaunchWish {
    let needs_launcher = args.nnodes != 1 || args.max_restarts > 0;
    LaunchWish { nproc: args.nproc, needs_launcher }
}

/// The library's name of a backend.
pub(super) fn backend(backend: BackendArg) -> Backend {
    match backend {
        BackendArg::Auto => Backend::Auto,
        BackendArg::Nccl => Backend::Nccl,
        BackendArg::Gloo => Backend::Gloo,
    }
}

/// The launch of `nproc` ranks on this machine, which have `grace` to save after SIGTERM.
pub(super) fn config(
    args: LaunchArgs,
    nproc: usize,
    grace: Duration,
) -> anyhow::Result<LaunchConfig> {
    let LaunchArgs {
        nproc: _,
        nnodes,
        node_rank,
        rdzv_endpoint,
        max_restarts,
        join_timeout,
        collective_timeout: _,
        backend: _,
    } = args;
    let node_rank = match node_rank {
        Some(node_rank) => node_rank,
        // A default would make two machines the same one.
        None if nnodes > 1 => return Err(Error::MissingFlag { flag: "--node-rank", nnodes }.into()),
        None => 0,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let resumes = arguments.iter().any(|argument| argument == RESUME);
    let restart_args = if resumes { Vec::new() } else { vec![RESUME.into()] };
    let join_timeout = Duration::from_secs(join_timeout);
    let config = LaunchConfig::new(program, arguments, nproc);
    let config = LaunchConfig { restart_args, nnodes, node_rank, rdzv_endpoint, ..config };
    let save_grace = grace - LAST_WORDS.min(grace / 10);
    let config = LaunchConfig { max_restarts, join_timeout, save_grace, ..config };
    config.check()?;
    Ok(config)
}

/// Starts the ranks and follows them to their end.
pub(super) fn start(config: &LaunchConfig, stop: &AtomicBool) -> anyhow::Result<()> {
    match launch(config, stop)? {
        Finished::Completed => {}
        Finished::Stopped => tracing::warn!("stopped; --resume continues"),
    }
    Ok(())
}
