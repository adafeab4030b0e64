//! Settings and verdicts; what happens to real processes is in `tests/processes.rs`.

use super::*;

fn config() -> LaunchConfig {
    LaunchConfig::new("worker".into(), Vec::new(), 2)
}

fn venue() -> Venue {
    open_venue(&config()).unwrap()
}

fn death(rank: usize, cause: ExitCause) -> Death {
    Death { rank, pid: 100, cause }
}

fn named(deaths: &[Death], venue: &Venue) -> (usize, Option<String>) {
    match verdict(deaths, venue) {
        Error::WorkerDied { rank, lost_peer, .. } => (rank, lost_peer),
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
    check(&|config| config.nnodes = 2, "--rdzv-endpoint is ");
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
}

#[test]
fn a_signal_is_the_cause_whoever_ended_first() {
    let deaths = [death(0, ExitCause::Code(1)), death(1, ExitCause::Signal(libc::SIGKILL))];
    assert_eq!(named(&deaths, &venue()), (1, None));
}

#[test]
fn a_rank_that_lost_a_peer_is_not_the_cause() {
    let venue = venue();
    let store = venue.store.as_ref().unwrap();
    store.set(&lost_peer_key(0), b"barrier failed").unwrap();
    let deaths = [death(0, ExitCause::Code(1)), death(1, ExitCause::Code(3))];
    assert_eq!(named(&deaths, &venue), (1, None));
    let lone = [death(0, ExitCause::Code(1))];
    assert_eq!(named(&lone, &venue), (0, Some("barrier failed".to_owned())));
}

#[test]
fn without_reports_the_first_to_end_is_the_cause() {
    let deaths = [death(2, ExitCause::Code(1)), death(0, ExitCause::Code(1))];
    assert_eq!(named(&deaths, &venue()), (2, None));
}
