//! Training runs that are observed, signalled and killed while running.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::world::{Run, World};

/// Long enough for processes to start and connect on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A process with its output so far; killed when dropped.
pub(crate) struct Running {
    child: Child,
    said: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let said = Arc::new(Mutex::new(String::new()));
        let heard = Arc::clone(&said);
        let reader = std::thread::spawn(move || {
            let mut line = String::new();
            while lines.read_line(&mut line).is_ok_and(|read| read > 0) {
                heard.lock().unwrap().push_str(&std::mem::take(&mut line));
            }
        });
        Self { child, said, reader: Some(reader) }
    }

    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Waits until it has printed `text` this many times.
    pub(crate) fn await_said(&mut self, text: &str, times: usize) {
        self.until(|run| run.said().matches(text).count() >= times);
    }

    /// Waits until `save_path` has a line of metrics for `step`.
    pub(crate) fn await_step(&mut self, save_path: &Path, step: u64) {
        let line = format!("{{\"step\":{step},");
        let metrics = save_path.join("metrics.jsonl");
        self.until(|_| std::fs::read_to_string(&metrics).is_ok_and(|lines| lines.contains(&line)));
    }

    /// Waits until it starts writing a checkpoint below `save_path`.
    pub(crate) fn await_save(&mut self, save_path: &Path) {
        self.until(|_| {
            let names = std::fs::read_dir(save_path).unwrap().map(|entry| entry.unwrap().path());
            let pending = |path: &Path| path.extension().is_some_and(|end| end == "tmp");
            names.into_iter().any(|path| pending(&path) && path.join("trainer").is_dir())
        });
    }

    fn until(&mut self, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() || holds(self), "it has ended: {}", self.said());
            assert!(Instant::now() < deadline, "waited in vain: {}", self.said());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Process ids of a launcher's ranks, in their order.
    pub(crate) fn ranks(&self) -> Vec<u32> {
        let id = self.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        children.split_whitespace().map(|id| id.parse().unwrap()).collect()
    }

    pub(crate) fn end(mut self) -> Run {
        let mut stdout = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        Run { code: status.code(), stdout, stderr: self.said() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn send(signal: &str, id: u32) {
    let status = Command::new("kill").args([signal, &id.to_string()]).status().unwrap();
    assert!(status.success());
}

/// A port that is unused at the moment.
pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts the ranks of a job with only the four usual variables, like a plain script.
pub(crate) fn start_workers(
    world: &World,
    save: &str,
    more: &[&str],
    ranks: usize,
) -> Vec<Running> {
    let port = free_port().to_string();
    (0..ranks)
        .map(|rank| {
            let mut command = world.command(save, more);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            Running::start(&mut command)
        })
        .collect()
}
