//! Watches a group of GPU processes from a thread of its own, because NCCL waits forever: it polls
//! NCCL's asynchronous error, detects peers that have ended and collectives that take too long, and
//! then aborts the group, so that waiting calls return and fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dflash_torch_sys::{Error as TorchError, NcclWatch};

use crate::lifeline::Lifeline;

/// Interval between checks.
const POLL: Duration = Duration::from_millis(100);

/// Work that involves a peer which ended normally completes within this time.
const LAST_WORK: Duration = Duration::from_secs(1);

/// Time for the process to end by itself after its group was aborted. A driver call that does not
/// return, or a rank that waits for something else, would take longer.
const LAST_RESORT: Duration = Duration::from_secs(10);

/// The exit code of an error that the user can fix, as in the programs.
const FAULT: i32 = 1;

/// The watch thread; dropping this ends it.
pub(crate) struct Watch {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `timeout` is for each collective.
    pub(crate) fn start(group: NcclWatch, lifeline: Lifeline, timeout: Duration) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let thread = Watching { group, lifeline, gone: None, timeout, ended: Arc::clone(&ended) };
        let thread = std::thread::spawn(move || thread.run());
        Self { ended, thread: Some(thread) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It panics only on a bug, which has already been reported.
            let _ = thread.join();
        }
    }
}

struct Watching {
    group: NcclWatch,
    lifeline: Lifeline,
    /// The first peer that has ended, and when that was detected.
    gone: Option<(usize, Instant)>,
    timeout: Duration,
    ended: Arc<AtomicBool>,
}

impl Watching {
    fn run(mut self) {
        while !self.is_over(POLL) {
            if let Some(reason) = self.fault() {
                self.group.give_up(reason.clone());
                // Tell the others now, not when this process has ended.
                self.lifeline = Lifeline::default();
                return self.see_out(&reason);
            }
        }
    }

    /// Why the group cannot continue, if it cannot.
    fn fault(&mut self) -> Option<String> {
        if let Some(rank) = self.lifeline.gone() {
            self.gone.get_or_insert((rank, Instant::now()));
        }
        if let Err(error) = self.group.check() {
            return Some(reported(error));
        }
        let (operation, begun) = match self.group.oldest_unfinished() {
            Ok(unfinished) => unfinished?,
            Err(error) => return Some(error.to_string()),
        };
        match self.gone {
            Some((rank, seen)) if seen.elapsed() >= LAST_WORK => {
                let left = "has ended or given up before its part in this";
                Some(format!("rank {rank} {left} {operation}"))
            }
            _ if begun.elapsed() >= self.timeout => Some(format!(
                "this {operation} is not done after {} s (--collective-timeout); a rank hangs or is \
                 far behind",
                self.timeout.as_secs_f64()
            )),
            _ => None,
        }
    }

    /// Ends the process if it does not end by itself.
    fn see_out(&self, reason: &str) {
        if !self.is_over(LAST_RESORT) {
            tracing::error!(
                "{reason}; the process has not ended within {} s of it and is ended now",
                LAST_RESORT.as_secs()
            );
            signal_hook::low_level::exit(FAULT);
        }
    }

    /// Whether the group was dropped, within `patience`.
    fn is_over(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.ended.load(Ordering::Relaxed) || left.is_zero() {
                return self.ended.load(Ordering::Relaxed);
            }
            std::thread::park_timeout(left);
        }
    }
}

/// An error that NCCL reported itself.
fn reported(error: TorchError) -> String {
    match error {
        TorchError::NcclPeer { message, .. } => {
            format!("NCCL reports that a peer or the network failed: {message}")
        }
        TorchError::Nccl { message, .. } => format!("NCCL reports a fault: {message}"),
        other => other.to_string(),
    }
}
