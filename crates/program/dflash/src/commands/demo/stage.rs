//! Starts and watches the demo's programs, and terminates them when the demo is stopped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use dflash_cpu::VARIABLE;
use dflash_settings::ProcessorSettings;
use sysinfo::{Pid, ProcessesToUpdate, Signal, System};

/// Polling interval for a running program and the stop flag.
const POLL: Duration = Duration::from_millis(50);
/// Time for a program to exit, shorter than the front program's own grace period.
const PATIENCE: Duration = Duration::from_secs(3);

/// Starts this program with other command lines.
pub(super) struct Programs {
    program: PathBuf,
    processor: ProcessorSettings,
    stop: Arc<AtomicBool>,
}

impl Programs {
    pub(super) fn new(
        processor: ProcessorSettings,
        stop: &Arc<AtomicBool>,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        Ok(Self { program, processor, stop: Arc::clone(stop) })
    }

    /// Starts `dflash` with `line`, split at spaces, followed by `more`.
    pub(super) fn start(
        &self,
        line: &str,
        more: &[&str],
        stdout: Stdio,
        stderr: Stdio,
    ) -> anyhow::Result<Running> {
        let mut command = Command::new(&self.program);
        command.args(line.split_whitespace()).args(more);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        command.envs(self.processor.cpu_level.map(|level| (VARIABLE, level.name())));
        let child =
            command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        Ok(Running(child))
    }

    /// Runs a command to its end; discards its stdout and shows its stderr.
    pub(super) fn run(&self, line: &str, more: &[&str]) -> anyhow::Result<()> {
        self.run_into(line, more, Stdio::null())
    }

    /// The same, with stdout sent to `stdout`.
    pub(super) fn run_into(&self, line: &str, more: &[&str], stdout: Stdio) -> anyhow::Result<()> {
        let mut running = self.start(line, more, stdout, Stdio::inherit())?;
        loop {
            if let Some(status) = running.0.try_wait()? {
                self.check_stop()?;
                if !status.success() {
                    bail!("stopped, {status} of: dflash {line} {}", more.join(" "));
                }
                return Ok(());
            }
            self.check_stop()?;
            std::thread::sleep(POLL);
        }
    }

    /// Waits until `ready` returns a value or the program exits.
    pub(super) fn wait_for<T>(
        &self,
        running: &mut Running,
        limit: Duration,
        ready: impl Fn() -> Option<T>,
    ) -> anyhow::Result<T> {
        let began = Instant::now();
        loop {
            if let Some(answer) = ready() {
                return Ok(answer);
            }
            if let Some(status) = running.0.try_wait()? {
                bail!("it ended with {status}");
            }
            if began.elapsed() > limit {
                bail!("no answer within {} s", limit.as_secs());
            }
            self.check_stop()?;
            std::thread::sleep(POLL);
        }
    }

    fn check_stop(&self) -> anyhow::Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            bail!("interrupted; the same command continues from here");
        }
        Ok(())
    }
}

/// A program that is terminated on drop, with SIGTERM first and SIGKILL later.
pub(super) struct Running(Child);

impl Running {
    pub(super) fn end(mut self) {
        self.end_now();
    }

    fn end_now(&mut self) {
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        let pid = Pid::from_u32(self.0.id());
        let mut system = System::new();
        system.refresh_processes(ProcessesToUpdate::Some(&[pid]), false);
        if let Some(process) = system.process(pid) {
            process.kill_with(Signal::Term);
        }
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(POLL);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end_now();
    }
}

/// A path as an argument. Bytes that are not UTF-8 are lost, and the file is then not found.
pub(super) fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
