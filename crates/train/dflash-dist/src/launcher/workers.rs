//! The worker processes of one launcher.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::launch_store::AttemptStore;
use super::{LaunchConfig, POLL, output, process};
use crate::wait::until;
use crate::{Error, ExitCause};

/// How long to wait for a worker's last lines after its end.
const LAST_LINES: Duration = Duration::from_millis(500);

/// A worker that ended with a code other than 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Death {
    pub(super) rank: usize,
    pub(super) pid: u32,
    pub(super) cause: ExitCause,
}

/// All workers of this launcher; those that still run when it is dropped are killed.
pub(super) struct Workers {
    running: Vec<Worker>,
    /// In the order in which they were seen to end.
    deaths: Vec<Death>,
    /// Threads that copy the workers' output.
    forwarders: Vec<JoinHandle<()>>,
}

struct Worker {
    rank: usize,
    child: Child,
}

impl Workers {
    pub(super) fn start(config: &LaunchConfig, store: &AttemptStore) -> Result<Self, Error> {
        let mut workers = Self { running: Vec::new(), deaths: Vec::new(), forwarders: Vec::new() };
        for local_rank in 0..config.nproc {
            let rank = config.node_rank * config.nproc + local_rank;
            let mut command = command(config, store, local_rank);
            let child = command.spawn().map_err(|source| {
                let program = config.program.clone();
                Error::Spawn { rank, program, source }
            })?;
            workers.adopt(rank, child);
        }
        Ok(workers)
    }

    fn adopt(&mut self, rank: usize, mut child: Child) {
        let stdout = child.stdout.take().map(|pipe| output::forward(rank, pipe));
        let stderr = child.stderr.take().map(|pipe| output::forward(rank, pipe));
        self.forwarders.extend(stdout.into_iter().chain(stderr));
        self.running.push(Worker { rank, child });
    }

    /// Collects workers that have ended.
    pub(super) fn poll(&mut self) {
        let Self { running, deaths, .. } = self;
        running.retain_mut(|worker| match worker.child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                deaths.extend(death(worker, status));
                false
            }
            // Only for a process that is not our child; then there is nothing to wait for.
            Err(_) => false,
        });
    }

    pub(super) fn deaths(&self) -> Vec<Death> {
        self.deaths.clone()
    }

    pub(super) fn all_ended(&self) -> bool {
        self.running.is_empty()
    }

    /// Sends `signal` to all workers that still run.
    pub(super) fn signal(&self, signal: i32) {
        for worker in &self.running {
            process::signal_group(worker.child.id(), signal);
        }
    }

    /// Sends `signal` to one worker that still runs.
    pub(super) fn signal_one(&self, signal: i32) {
        if let Some(worker) = self.running.first() {
            process::signal_group(worker.child.id(), signal);
        }
    }

    /// Waits up to `grace` for the other workers, kills the rest, and waits for the last lines.
    /// Returns the ranks that were killed.
    pub(super) fn finish(&mut self, grace: Duration) -> Vec<usize> {
        until(Instant::now(), grace, POLL, || {
            self.poll();
            self.all_ended().then_some(())
        });
        let killed = self.running.iter().map(|worker| worker.rank).collect();
        self.kill();
        // A process left behind by a worker may hold its streams open.
        let copied = || self.forwarders.iter().all(JoinHandle::is_finished).then_some(());
        until(Instant::now(), LAST_LINES, Duration::from_millis(5), copied);
        killed
    }

    fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        for mut worker in self.running.drain(..) {
            let _ = worker.child.wait();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.kill();
    }
}

fn death(worker: &Worker, status: ExitStatus) -> Option<Death> {
    let cause = match (status.code(), status.signal()) {
        (Some(0), _) => return None,
        (Some(code), _) => ExitCause::Code(code),
        (None, signal) => ExitCause::Signal(signal.unwrap_or_default()),
    };
    Some(Death { rank: worker.rank, pid: worker.child.id(), cause })
}

/// One worker's command line, environment and streams.
fn command(config: &LaunchConfig, store: &AttemptStore, local_rank: usize) -> Command {
    let mut command = Command::new(&config.program);
    command.args(&config.args).stdin(Stdio::null());
    command.envs(variables(config, store, local_rank));
    let is_unset = |(name, _): &(&str, String)| std::env::var_os(name).is_none();
    command.envs(defaults(config.nproc).into_iter().filter(is_unset));
    command.envs(config.env.iter().cloned());
    // Rank 0 keeps our terminal, for its progress bar and its results.
    if config.node_rank > 0 || local_rank > 0 {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    process::bind_to_us(&mut command);
    command
}

/// torchrun's variables for one worker.
fn variables(
    config: &LaunchConfig,
    store: &AttemptStore,
    local_rank: usize,
) -> [(&'static str, String); 12] {
    let rank = config.node_rank * config.nproc + local_rank;
    [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("WORLD_SIZE", config.world_size().to_string()),
        ("LOCAL_WORLD_SIZE", config.nproc.to_string()),
        ("GROUP_RANK", config.node_rank.to_string()),
        ("GROUP_WORLD_SIZE", config.nnodes.to_string()),
        ("MASTER_ADDR", store.launch.host.clone()),
        ("MASTER_PORT", store.launch.port.to_string()),
        ("TORCHELASTIC_RUN_ID", store.launch.run_id.clone()),
        ("TORCHELASTIC_RESTART_COUNT", store.attempt.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", config.max_restarts.to_string()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
    ]
}

/// Variables for workers unless the user has set them.
fn defaults(nproc: usize) -> [(&'static str, String); 1] {
    [("OMP_NUM_THREADS", threads_each(nproc).to_string())]
}

/// An equal share of the machine's cores; otherwise each worker would start a thread per core.
fn threads_each(nproc: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    (cores / nproc).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::tests::attempt_store;
    use super::*;

    #[test]
    fn the_second_node_s_workers_have_the_upper_ranks() {
        let mut config = LaunchConfig::new("worker".into(), Vec::new(), 4);
        (config.nnodes, config.node_rank) = (2, 1);
        let store = attempt_store(2);
        let variables = variables(&config, &store, 3);
        let check = |name, expected: &str| {
            let (_, value) = variables.iter().find(|(key, _)| *key == name).unwrap();
            assert_eq!(value, expected, "{name}");
        };
        check("RANK", "7");
        check("LOCAL_RANK", "3");
        check("WORLD_SIZE", "8");
        check("LOCAL_WORLD_SIZE", "4");
        check("MASTER_ADDR", "127.0.0.1");
        check("MASTER_PORT", &store.launch.port.to_string());
        check("TORCHELASTIC_RESTART_COUNT", "2");
    }

    #[test]
    fn every_worker_has_a_thread() {
        assert_eq!(threads_each(usize::MAX), 1);
        assert!(threads_each(1) >= 1);
    }
}
