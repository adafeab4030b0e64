//! One start of all workers of this machine, from beginning to end.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::failure::{self, Failure};
use super::launch_store::AttemptStore;
use super::nodes::Nodes;
use super::signals::Signals;
use super::workers::{Death, Workers};
use super::{Finished, LaunchConfig, POLL};
use crate::Error;

/// How long to watch for further deaths after the first: a rank that shuts down in order closes its
/// connections first, so that a peer may die before it ends.
const FURTHER_DEATHS: Duration = Duration::from_millis(600);

/// How long to wait for the cause of a lost peer, if it is on another node.
const CAUSE_ELSEWHERE: Duration = Duration::from_secs(2);

/// Ranks leave their last barrier together, so their launchers end within this time of each other.
const LAST_TO_END: Duration = Duration::from_secs(30);

/// The same after a signal, when there is less time.
const LAST_TO_STOP: Duration = Duration::from_secs(1);

/// One start of all workers of this machine.
pub(super) struct Attempt<'a> {
    pub(super) config: &'a LaunchConfig,
    pub(super) store: AttemptStore,
    pub(super) signals: &'a Signals<'a>,
}

/// How an attempt ended.
pub(super) enum Ended {
    Well(Finished),
    Badly(Failure),
}

/// Why the launcher stopped waiting.
enum End {
    AllDone,
    Asked,
    Deaths(Vec<Death>),
    Elsewhere(Failure),
}

impl Attempt<'_> {
    /// Starts the workers and returns when the last has ended.
    pub(super) fn run(&self, nodes: &mut Nodes) -> Result<Ended, Error> {
        let mut workers = match Workers::start(self.config, &self.store) {
            Ok(workers) => workers,
            Err(error) => return Ok(Ended::Badly(nodes.agree(Failure::lasting(error)))),
        };
        let ended = match self.follow(&mut workers, nodes) {
            End::AllDone => {
                let elsewhere = nodes.all_done(LAST_TO_END);
                elsewhere.map_or(Ended::Well(Finished::Completed), Ended::Badly)
            }
            End::Asked => self.stop(&mut workers, nodes)?,
            End::Deaths(deaths) if failure::were_stopped(&deaths) => {
                self.see_off(&mut workers, nodes)?
            }
            End::Deaths(deaths) => Ended::Badly(self.fall(&mut workers, &deaths, nodes)),
            End::Elsewhere(failure) => {
                workers.signal(libc::SIGTERM);
                workers.finish(self.config.grace);
                Ended::Badly(failure)
            }
        };
        Ok(ended)
    }

    /// Waits for the end of the attempt.
    fn follow(&self, workers: &mut Workers, nodes: &mut Nodes) -> End {
        let mut watched_until: Option<Instant> = None;
        loop {
            workers.poll();
            if self.signals.any() {
                return End::Asked;
            }
            self.pass_on_save(workers);
            let deaths = workers.deaths();
            let watched = watched_until.is_some_and(|end| Instant::now() >= end);
            if !deaths.is_empty() && (watched || workers.all_ended()) {
                return End::Deaths(deaths);
            }
            if workers.all_ended() {
                return End::AllDone;
            }
            if !deaths.is_empty() {
                watched_until.get_or_insert_with(|| Instant::now() + FURTHER_DEATHS);
            } else if let Some(failure) = nodes.news() {
                return End::Elsewhere(failure);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Forwards SIGUSR1 once the ranks handle it; before that it would kill them. Only one rank
    /// gets it and tells the others: two that got it in different steps would save twice.
    fn pass_on_save(&self, workers: &Workers) {
        let save = self.signals.save();
        if save.load(Ordering::Relaxed) && self.store.has_begun() {
            save.store(false, Ordering::Relaxed);
            workers.signal_one(libc::SIGUSR1);
        }
    }

    /// Waits for the other ranks, which save and end because some of them were told to.
    fn see_off(&self, workers: &mut Workers, nodes: &Nodes) -> Result<Ended, Error> {
        let killed = workers.finish(self.config.save_grace);
        let deaths = workers.deaths();
        if killed.is_empty() && failure::were_stopped(&deaths) {
            return self.stopped_well(nodes);
        }
        let failure = failure::of_deaths(&deaths, self.config, &self.store);
        Err(nodes.agree(failure).after(self.store.attempt))
    }

    fn stopped_well(&self, nodes: &Nodes) -> Result<Ended, Error> {
        match nodes.all_done(LAST_TO_STOP) {
            None => Ok(Ended::Well(Finished::Stopped)),
            Some(failure) => Err(failure.after(self.store.attempt)),
        }
    }

    /// Forwards the signal and waits for the workers to end. SIGTERM tells them to save, so a
    /// worker that could not is an error.
    fn stop(&self, workers: &mut Workers, nodes: &Nodes) -> Result<Ended, Error> {
        let signal = self.signals.to_pass_on();
        workers.signal(signal);
        let terminated = signal == libc::SIGTERM;
        let grace = if terminated { self.config.save_grace } else { self.config.grace };
        let killed = workers.finish(grace);
        let disorderly: Vec<Death> = workers
            .deaths()
            .into_iter()
            .filter(|death| terminated && !failure::is_orderly(death, signal))
            .collect();
        if !disorderly.is_empty() {
            let failure = failure::of_deaths(&disorderly, self.config, &self.store);
            return Err(nodes.agree(failure).after(self.store.attempt));
        }
        if terminated && !killed.is_empty() {
            return Err(Error::NotStopped { ranks: killed, after: grace });
        }
        if killed.is_empty() && workers.deaths().is_empty() {
            // They were about to end when the signal came.
            let elsewhere = nodes.all_done(LAST_TO_STOP);
            return Ok(elsewhere.map_or(Ended::Well(Finished::Completed), Ended::Badly));
        }
        self.stopped_well(nodes)
    }

    /// Stops the other ranks after a death, and finds its cause among all nodes.
    fn fall(&self, workers: &mut Workers, deaths: &[Death], nodes: &Nodes) -> Failure {
        let mut failure = failure::of_deaths(deaths, self.config, &self.store);
        workers.signal(libc::SIGTERM);
        if failure.is_cause {
            // The other nodes are told before our own ranks have ended.
            failure = nodes.agree(failure);
            workers.finish(self.config.grace);
            return failure;
        }
        workers.finish(self.config.grace);
        match nodes.await_failure(CAUSE_ELSEWHERE) {
            Some(cause) => cause,
            None => nodes.agree(failure),
        }
    }
}
