//! Endpoints and failures; `tests/it` covers their effects.

use super::launch_store::AttemptStore;
use super::workers::Death;
use super::*;
use crate::ExitCause;
use crate::gloo::{BEGAN_KEY, PERMANENT_KEY, lost_peer_key};

/// Nobody stops these jobs.
static NOT_STOPPED: AtomicBool = AtomicBool::new(false);

fn config() -> LaunchConfig {
    LaunchConfig::new("worker".into(), Vec::new(), 2)
}

pub(super) fn attempt_store(attempt: usize) -> AttemptStore {
    let signals = Signals::watch(&NOT_STOPPED).unwrap();
    LaunchStore::open(&config(), &signals).unwrap().unwrap().of_attempt(attempt).unwrap()
}

fn death(rank: usize, cause: ExitCause) -> Death {
    Death { rank, pid: 100, cause }
}

#[test]
fn endpoints_are_taken_apart() {
    let check = |endpoint: &str, expected: Option<(&str, u16)>| {
        let rdzv_endpoint = Some(endpoint.to_owned());
        let config = LaunchConfig { nnodes: 2, rdzv_endpoint, ..config() };
        let found = config.endpoint().ok().flatten();
        let expected = expected.map(|(host, port)| (host.to_owned(), port));
        assert_eq!(found, expected, "{endpoint}");
    };
    check("head:29500", Some(("head", 29500)));
    check("[fe80::1]:1", Some(("fe80::1", 1)));
    check(":29500", None);
    check("head:port", None);
    check("head:0", None);
}

#[test]
fn the_cause_is_told_from_its_consequences() {
    let killed = ExitCause::Signal(libc::SIGKILL);
    let failed = ExitCause::Code(1);
    // (rank, lost peer, silent ranks) of the death that is named
    let check = |lost: Option<usize>,
                 deaths: &[Death],
                 expected: (usize, Option<&str>, &[usize])| {
        let store = attempt_store(0);
        if let Some(rank) = lost {
            store.store.store.set(&lost_peer_key(rank), b"barrier failed").unwrap();
        }
        let error = failure::of_deaths(deaths, &config(), &store).error;
        let Error::WorkerDied { rank, lost_peer, silent, .. } = error else { panic!("{error}") };
        assert_eq!((rank, lost_peer.as_deref(), &silent[..]), expected, "{deaths:?}");
    };
    // a signal, whichever rank ended first
    check(None, &[death(0, failed), death(1, killed)], (1, None, &[]));
    // not a rank that lost a peer, unless nothing else is known
    check(Some(0), &[death(0, failed), death(1, ExitCause::Code(3))], (1, None, &[]));
    check(Some(0), &[death(0, failed)], (0, Some("barrier failed"), &[1]));
    // without reports, the first to end
    check(None, &[death(2, failed), death(0, failed)], (2, None, &[]));
}

#[test]
fn what_may_pass_is_tried_again() {
    let check = |cause, said: &[&str], expected: bool| {
        let store = attempt_store(0);
        said.iter().for_each(|key| store.store.store.set(key, b"").unwrap());
        let failure = failure::of_deaths(&[death(0, cause)], &config(), &store);
        assert_eq!(failure.may_pass, expected, "{cause:?} {said:?}");
    };
    check(ExitCause::Signal(libc::SIGKILL), &[], true);
    check(ExitCause::Code(101), &[], true);
    check(ExitCause::Code(1), &[BEGAN_KEY], true);
    check(ExitCause::Code(1), &[], false);
    check(ExitCause::Code(2), &[], false);
    check(ExitCause::Code(130), &[BEGAN_KEY], false);
    check(ExitCause::Code(143), &[BEGAN_KEY], false);
    // a permanent error; a bug in one rank may be bad luck
    check(ExitCause::Code(1), &[BEGAN_KEY, PERMANENT_KEY], false);
    check(ExitCause::Code(101), &[BEGAN_KEY, PERMANENT_KEY], true);
}

#[test]
fn only_the_signal_that_was_sent_ends_in_order() {
    let check = |cause, signal, expected: bool| {
        assert_eq!(failure::is_orderly(&death(0, cause), signal), expected, "{cause:?} {signal}");
    };
    check(ExitCause::Signal(libc::SIGTERM), libc::SIGTERM, true);
    check(ExitCause::Signal(libc::SIGKILL), libc::SIGTERM, false);
    check(ExitCause::Code(143), libc::SIGTERM, true);
    check(ExitCause::Code(130), libc::SIGINT, true);
    check(ExitCause::Code(1), libc::SIGTERM, false);
}

#[test]
fn a_failure_survives_the_store() {
    let error = Error::MissingFlag { flag: "--node-rank", nnodes: 2 };
    let failure = failure::Failure::lasting(error);
    let read = failure::Failure::from_report(&failure.to_report(1));
    assert!(!read.may_pass && read.is_from(1));
    let expected = "node 1 reports: --node-rank is missing; --nnodes 2 needs it on every node";
    assert_eq!(read.error.to_string(), expected);
    assert_eq!(read.after(2).to_string(), format!("{expected} (after 2 restart(s))"));
}
