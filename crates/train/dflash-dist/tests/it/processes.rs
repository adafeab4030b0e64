//! Real processes: groups of one, two and four started by our launcher, by hand and, if installed,
//! by torchrun, and what remains after deaths, signals and a killed launcher.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::free_port;

const PROBE: &str = env!("CARGO_BIN_EXE_dist-probe");

/// Documented time within which all processes are gone after a death or a signal.
pub(crate) const PROMISE: Duration = Duration::from_secs(5);

/// Long enough for processes to start and connect on a busy machine.
pub(crate) const START: Duration = Duration::from_secs(60);

pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn probe(arguments: &str) -> Command {
    let mut command = Command::new(PROBE);
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

pub(crate) fn run(command: &mut Command) -> Outcome {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Outcome { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
}

pub(crate) fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A launcher with lingering workers, and the workers' process ids.
fn lingering(nproc: usize) -> (Child, Vec<u32>) {
    let mut launcher = start(&mut probe(&format!("launch {nproc} linger")));
    let mut line = String::new();
    BufReader::new(launcher.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let ids: Vec<u32> =
        line.trim().trim_start_matches("pids ").split(' ').map(|id| id.parse().unwrap()).collect();
    assert_eq!(ids.len(), nproc);
    (launcher, ids)
}

fn send(signal: &str, id: u32) {
    let status = Command::new("kill").args([signal, &id.to_string()]).status().unwrap();
    assert!(status.success());
}

/// Whether the process runs; zombies do not count.
fn is_running(id: u32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{id}/stat")) else { return false };
    let (_, rest) = status.rsplit_once(')').unwrap();
    !rest.trim_start().starts_with(['Z', 'X'])
}

/// Local addresses, in the kernel's notation, of the process's listening sockets.
fn listening(id: u32) -> Vec<String> {
    let descriptors = std::fs::read_dir(format!("/proc/{id}/fd")).unwrap();
    let links = descriptors.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{id}/net/{table}")).unwrap_or_default();
        for line in table.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // State 0A is LISTEN; the tenth field is the socket's inode.
            if fields[3] == "0A" && sockets.contains(&format!("socket:[{}]", fields[9])) {
                found.push(fields[1].to_owned());
            }
        }
    }
    found
}

fn assert_gone_within(limit: Duration, ids: &[u32]) {
    let deadline = Instant::now() + limit;
    while ids.iter().any(|&id| is_running(id)) {
        assert!(Instant::now() < deadline, "still running: {ids:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn wait_within(limit: Duration, child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < deadline, "the launcher did not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The launcher's standard error, once it has exited.
pub(crate) fn said(launcher: &mut Child) -> String {
    let mut text = String::new();
    launcher.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

fn check_launched(nproc: usize) {
    let outcome = run(&mut probe(&format!("launch {nproc} check")));
    assert!(outcome.status.success(), "{}", outcome.stderr);
    let line = format!("rank 0 of {nproc}: all collectives agree\n");
    assert_eq!(outcome.stdout, line, "only rank 0 writes to standard output");
    for rank in 1..nproc {
        let line = format!("[rank {rank}] rank {rank} of {nproc}: all collectives agree\n");
        assert!(outcome.stderr.contains(&line), "{}", outcome.stderr);
    }
    assert!(outcome.stderr.ends_with("finished: Completed\n"), "{}", outcome.stderr);
}

#[test]
fn collectives_of_one_process() {
    check_launched(1);
}

#[test]
fn collectives_of_two_processes() {
    check_launched(2);
}

#[test]
fn collectives_of_four_processes() {
    check_launched(4);
}

#[test]
fn one_machine_listens_on_its_loopback_alone() {
    let (mut launcher, ids) = lingering(2);
    let store = listening(launcher.id());
    assert_eq!(store.len(), 1, "{store:?}");
    for address in ids.iter().flat_map(|&id| listening(id)).chain(store) {
        assert!(address.starts_with("0100007F:"), "{address} is not 127.0.0.1");
    }
    send("-TERM", launcher.id());
    wait_within(PROMISE, &mut launcher);
}

#[test]
fn collectives_without_a_launcher_s_store() {
    let port = free_port().to_string();
    let mut workers: Vec<Child> = (0..2)
        .map(|rank| {
            let mut command = probe("check");
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
            start(command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port))
        })
        .collect();
    for worker in &mut workers {
        let status = wait_within(START, worker);
        assert!(status.success(), "{}", said(worker));
    }
}

#[test]
fn torchrun_starts_workers() {
    let Some(torchrun) = torchrun() else {
        println!("skipped: no torchrun in DFLASH_TORCHRUN or PATH");
        return;
    };
    let mut command = Command::new(torchrun);
    command.args(["--no-python", "--nproc-per-node", "2", "--master-port"]);
    command.arg(free_port().to_string()).args([PROBE, "check"]);
    let outcome = run(&mut command);
    assert!(outcome.status.success(), "{}", outcome.stderr);
    for rank in 0..2 {
        let line = format!("rank {rank} of 2: all collectives agree");
        assert!(outcome.stdout.contains(&line), "{}{}", outcome.stdout, outcome.stderr);
    }
}

#[test]
fn what_no_restart_can_mend_ends_the_attempts_of_torchrun_at_once() {
    let Some(torchrun) = torchrun() else {
        println!("skipped: no torchrun in DFLASH_TORCHRUN or PATH");
        return;
    };
    let mut command = Command::new(torchrun);
    command.args(["--no-python", "--nproc-per-node", "2", "--max-restarts", "2", "--master-port"]);
    command.arg(free_port().to_string()).args([PROBE, "hopeless", "1"]);
    let Outcome { status, stderr, .. } = run(&mut command);
    assert!(!status.success(), "{stderr}");
    assert_eq!(stderr.matches("error: --setting is wrong").count(), 1, "{stderr}");
    for attempt in [1, 2] {
        let text = format!("restart {attempt} would fail like the attempt before");
        assert!(stderr.contains(&text), "{text:?} is not in {stderr}");
    }
}

fn torchrun() -> Option<PathBuf> {
    let named = std::env::var_os("DFLASH_TORCHRUN").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("torchrun"));
    named.into_iter().chain(on_path).find(|file| works(file))
}

fn works(torchrun: &Path) -> bool {
    let output = Command::new(torchrun).arg("--help").output();
    output.is_ok_and(|output| output.status.success())
}

/// One rank dies; the launcher must report which one and how, and exit soon.
fn check_lost(nproc: usize, task: &str, expected: &[&str]) {
    let mut launcher = start(&mut probe(&format!("launch {nproc} lose {task}")));
    await_line(&mut launcher, "about to end");
    let status = wait_within(PROMISE, &mut launcher);
    let said = said(&mut launcher);
    assert_eq!(status.code(), Some(1), "{said}");
    for text in expected {
        assert!(said.contains(text), "{text:?} is not in {said}");
    }
}

/// Reads standard error up to a line, byte by byte, leaving the rest to others.
fn await_line(launcher: &mut Child, expected: &str) {
    let pipe = launcher.stderr.as_mut().unwrap();
    let mut seen = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&seen).contains(expected) {
        assert_eq!(pipe.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
}

#[test]
fn a_rank_that_exits_is_named_and_so_is_what_its_peers_were_doing() {
    let expected =
        ["error: rank 1 (node 0, ", "exited with code 7", "rank 0: all-reduce (sum) failed"];
    check_lost(2, "1 7", &expected);
}

#[test]
fn rank_0_is_named_as_well() {
    check_lost(2, "0 9", &["error: rank 0 (node 0, ", "exited with code 9"]);
}

#[test]
fn a_killed_rank_is_named_with_the_signal() {
    check_lost(4, "2 kill", &["error: rank 2 (node 0, ", "killed by signal 9 (SIGKILL)"]);
}

#[test]
fn an_aborted_rank_is_named_with_the_signal() {
    check_lost(2, "1 abort", &["error: rank 1 (node 0, ", "killed by signal 6 (SIGABRT)"]);
}

#[test]
fn an_exit_with_code_0_before_the_end_is_found_by_the_peers() {
    let expected = ["error: rank 0 (node 0, ", "after losing a peer (all-reduce"];
    check_lost(2, "1 0", &expected);
}

#[test]
fn a_rank_that_stays_away_from_a_collective_ends_the_job_after_its_timeout() {
    let outcome = run(&mut probe("launch 2 stall 1"));
    assert_eq!(outcome.status.code(), Some(1));
    let expected = [
        "rank 0: all-reduce (sum) failed",
        "error: rank 0 (node 0, ",
        "exited with code 1",
        "nothing was heard from rank 1",
    ];
    for text in expected {
        assert!(outcome.stderr.contains(text), "{text:?} is not in {}", outcome.stderr);
    }
}

/// Two launchers, as on two machines, each with two of four ranks.
#[test]
fn launchers_of_two_nodes_make_one_group() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let mut nodes: Vec<Child> = (0..2)
        .map(|node| {
            let mut command = probe(&format!("node {node} 2 {endpoint} 2 check"));
            start(&mut command)
        })
        .collect();
    for (node, launcher) in nodes.iter_mut().enumerate() {
        let status = wait_within(START, launcher);
        let said = said(launcher);
        assert!(status.success(), "{said}");
        let rank = 2 * node + 1;
        let line = format!("[rank {rank}] rank {rank} of 4: all collectives agree\n");
        assert!(said.contains(&line), "{said}");
    }
}

/// Runs launchers of two nodes with `task` and restarts; returns their exit codes and stderr.
fn two_nodes(restarts: usize, task: &str) -> [(Option<i32>, String); 2] {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let mut nodes = [0, 1].map(|node| {
        start(&mut probe(&format!("restarts {restarts} node {node} 2 {endpoint} 2 {task}")))
    });
    nodes.each_mut().map(|launcher| {
        // Read stderr to its end first: a full pipe would block the launcher.
        let said = said(launcher);
        (wait_within(START, launcher).code(), said)
    })
}

#[test]
fn after_a_death_all_ranks_are_started_again() {
    let outcome = run(&mut probe("restarts 2 launch 2 lose-first 1 kill"));
    assert!(outcome.status.success(), "{}", outcome.stderr);
    assert_eq!(outcome.stdout, "rank 0 of 2: all collectives agree\n");
}

#[test]
fn a_death_on_one_node_starts_the_ranks_of_both_again() {
    for (code, said) in two_nodes(1, "lose-first 3 kill") {
        assert_eq!(code, Some(0), "{said}");
        assert!(said.ends_with("finished: Completed\n"), "{said}");
    }
}

#[test]
fn both_nodes_name_the_rank_that_died_on_one() {
    let [(first, first_said), (second, second_said)] = two_nodes(0, "lose 3 kill");
    assert_eq!((first, second), (Some(1), Some(1)), "{first_said}{second_said}");
    let death = "rank 3 (node 1, ";
    assert!(first_said.contains(&format!("error: node 1 reports: {death}")), "{first_said}");
    assert!(second_said.contains(&format!("error: {death}")), "{second_said}");
}

#[test]
fn restarts_are_counted_and_end() {
    let outcome = run(&mut probe("restarts 2 launch 2 lose 1 kill"));
    assert_eq!(outcome.status.code(), Some(1));
    assert_eq!(outcome.stderr.matches("about to end").count(), 3, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("(after 2 restart(s))"), "{}", outcome.stderr);
}

#[test]
fn a_refused_setting_is_not_tried_again() {
    let outcome = run(&mut probe("restarts 3 launch 2 refuse 1"));
    assert_eq!(outcome.status.code(), Some(1));
    assert_eq!(outcome.stderr.matches("--setting is wrong").count(), 1, "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("restart(s)"), "{}", outcome.stderr);
}

#[test]
fn a_second_launcher_of_a_node_is_refused() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let mut first = start(&mut probe(&format!("node 0 2 {endpoint} 1 check")));
    let mut others =
        [1, 1].map(|node| start(&mut probe(&format!("node {node} 2 {endpoint} 1 check"))));
    let codes = others.each_mut().map(|launcher| wait_within(START, launcher).code());
    let said = others.each_mut().map(said);
    assert!(codes.contains(&Some(0)) && codes.contains(&Some(1)), "{codes:?} {said:?}");
    assert!(said.iter().any(|said| said.contains("--node-rank 1 has already joined")), "{said:?}");
    assert!(wait_within(START, &mut first).success());
}

#[test]
fn nodes_with_other_settings_are_refused() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let mut first = start(&mut probe(&format!("node 0 2 {endpoint} 2 check")));
    let mut second = start(&mut probe(&format!("node 1 2 {endpoint} 1 check")));
    assert_eq!(wait_within(START, &mut second).code(), Some(1));
    let said = said(&mut second);
    assert!(said.contains("--nproc 1") && said.contains("--nproc 2"), "{said}");
    send("-TERM", first.id());
    assert!(wait_within(PROMISE, &mut first).success(), "still waiting for its node");
}

/// The workers have no handler, so the forwarded signal ends them at once.
fn check_stopped(signal: &str) {
    let (mut launcher, ids) = lingering(2);
    let begin = Instant::now();
    send(signal, launcher.id());
    let status = wait_within(PROMISE, &mut launcher);
    assert!(status.success(), "{}", said(&mut launcher));
    assert!(said(&mut launcher).contains("finished: Stopped"));
    assert_gone_within(PROMISE.saturating_sub(begin.elapsed()), &ids);
}

#[test]
fn ctrl_c_stops_all() {
    check_stopped("-INT");
}

#[test]
fn termination_stops_all() {
    check_stopped("-TERM");
}

#[test]
fn a_worker_that_does_not_listen_is_killed() {
    let (mut launcher, ids) = lingering(2);
    // A stopped process does not react to SIGINT.
    send("-STOP", ids[1]);
    send("-INT", launcher.id());
    wait_within(PROMISE, &mut launcher);
    assert_gone_within(Duration::ZERO, &ids);
}

#[test]
fn no_worker_outlives_a_killed_launcher() {
    let (mut launcher, ids) = lingering(4);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert_gone_within(PROMISE, &ids);
}
