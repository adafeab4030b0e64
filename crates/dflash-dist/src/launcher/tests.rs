//! Settings and failures; what happens to real processes is in `tests/processes.rs`.

use super::launch_store::AttemptStore;
use super::workers::Death;
use super::*;
use crate::ExitCause;
use crate::gloo::{BEGAN_KEY, PERMANENT_KEY, lost_peer_key};

/// No one asks these jobs to stop.
static NOT_STOPPED: AtomicBool = AtomicBool::new(false);

fn config() -> LaunchConfig {
    LaunchConfig::new("worker".into(), Vec::new(), 2)
}

fn attempt_store() -> AttemptStore {
    let signals = Signals::watch(&NOT_STOPPED).unwrap();
    LaunchStore::open(&config(), &signals).unwrap().unwrap().of_attempt(0).unwrap()
}

fn death(rank: usize, cause: ExitCause) -> Death {
    Death { rank, pid: 100, cause }
}

/// Rank, lost peer and silent ranks of the death that is named.
fn named(deaths: &[Death], store: &AttemptStore) -> (usize, Option<String>, Vec<usize>) {
    match failure::of_deaths(deaths, &config(), store).error {
        Error::WorkerDied { rank, lost_peer, silent, .. } => (rank, lost_peer, silent),
        other => panic!("{other}"),
    }
}

#[test]
fn contradictions_name_the_flag() {
    let check = |change: &dyn Fn(&mut LaunchConfig), expected: &str| {
        let mut config = config();
        change(&mut config);
        let message = launch(&config, &AtomicBool::new(false)).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    check(&|config| config.nproc = 0, "--nproc is 0");
    check(&|config| config.nnodes = 0, "--nnodes is 0");
    check(&|config| config.node_rank = 1, "--node-rank is 1");
    check(&|config| config.nnodes = 2, "--rdzv-endpoint is missing; --nnodes 2 needs it");
    check(
        &|config| (config.nnodes, config.node_rank) = (2, 2),
        "--node-rank is 2, expected 0 to 1 (--nnodes is 2)",
    );
    check(
        &|config| {
            config.nnodes = 2;
            config.rdzv_endpoint = Some("head".to_owned());
        },
        "--rdzv-endpoint is head",
    );
    check(&|config| config.program = "/no/such/program".into(), "cannot start rank 0");
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
fn a_signal_is_the_cause_whoever_ended_first() {
    let deaths = [death(0, ExitCause::Code(1)), death(1, ExitCause::Signal(libc::SIGKILL))];
    assert_eq!(named(&deaths, &attempt_store()), (1, None, vec![]));
}

#[test]
fn a_rank_that_lost_a_peer_is_not_the_cause() {
    let store = attempt_store();
    store.set(&lost_peer_key(0), b"barrier failed");
    let deaths = [death(0, ExitCause::Code(1)), death(1, ExitCause::Code(3))];
    assert_eq!(named(&deaths, &store), (1, None, vec![]));
    let lone = [death(0, ExitCause::Code(1))];
    assert_eq!(named(&lone, &store), (0, Some("barrier failed".to_owned()), vec![1]));
}

#[test]
fn without_reports_the_first_to_end_is_the_cause() {
    let deaths = [death(2, ExitCause::Code(1)), death(0, ExitCause::Code(1))];
    assert_eq!(named(&deaths, &attempt_store()), (2, None, vec![]));
}

#[test]
fn what_may_pass_is_tried_again() {
    let check = |cause, has_begun: bool, expected: bool| {
        let store = attempt_store();
        if has_begun {
            store.set(BEGAN_KEY, b"");
        }
        let failure = failure::of_deaths(&[death(0, cause)], &config(), &store);
        assert_eq!(failure.may_pass, expected, "{cause:?}, begun: {has_begun}");
    };
    check(ExitCause::Signal(libc::SIGKILL), false, true);
    check(ExitCause::Code(101), false, true);
    check(ExitCause::Code(1), true, true);
    check(ExitCause::Code(1), false, false);
    check(ExitCause::Code(2), false, false);
    check(ExitCause::Code(130), true, false);
    check(ExitCause::Code(143), true, false);
}

#[test]
fn what_would_come_again_is_not_tried_again() {
    let store = attempt_store();
    store.set(BEGAN_KEY, b"");
    store.set(PERMANENT_KEY, b"");
    let failure = |code| failure::of_deaths(&[death(0, ExitCause::Code(code))], &config(), &store);
    assert!(!failure(1).may_pass);
    assert!(failure(101).may_pass, "a bug in one rank may be met by chance");
}

#[test]
fn only_the_signal_that_was_sent_ends_in_order() {
    let check = |cause, signal, expected: bool| {
        assert_eq!(failure::is_orderly(&death(0, cause), signal), expected, "{cause:?} {signal}");
    };
    check(ExitCause::Signal(libc::SIGTERM), libc::SIGTERM, true);
    check(ExitCause::Signal(libc::SIGKILL), libc::SIGTERM, false);
    check(ExitCause::Code(143), libc::SIGTERM, false);
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

#[test]
fn an_endpoint_where_nobody_listens_is_named() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("127.0.0.1:{free}");
    let (join_timeout, rdzv_endpoint) = (Duration::from_millis(300), Some(endpoint.clone()));
    let config = LaunchConfig { nnodes: 2, node_rank: 1, join_timeout, rdzv_endpoint, ..config() };
    let message = launch(&config, &NOT_STOPPED).unwrap_err().to_string();
    let expected = format!("nothing answers at --rdzv-endpoint {endpoint} after 0 s");
    assert!(message.contains(&expected), "{message}");
}

#[test]
fn a_node_that_does_not_come_is_named() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (join_timeout, rdzv_endpoint) =
        (Duration::from_millis(300), Some(format!("127.0.0.1:{free}")));
    let config = LaunchConfig { nnodes: 3, join_timeout, rdzv_endpoint, ..config() };
    let error = launch(&config, &NOT_STOPPED).unwrap_err();
    let Error::NodesMissing { missing, .. } = &error else { panic!("{error}") };
    assert_eq!(*missing, [1, 2]);
}
