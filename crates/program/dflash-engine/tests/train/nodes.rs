//! Two machines: network namespaces joined by a virtual cable, with a launcher in each.
//!
//! Each also has a second interface with the default route: a rank that listened on that address
//! would be unreachable for its peers.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::assert_same_losses;
use crate::running::{Running, free_port, send, start_workers};
use crate::world::{Run, World, losses};

const ENDPOINT: &str = "10.77.0.1:29411";

/// Two namespaces; deleted when dropped.
struct Machines {
    names: [String; 2],
}

impl Machines {
    /// `None`, with a counted message, if creating namespaces is not permitted.
    fn new(test: &str) -> Option<Self> {
        let names = [0, 1].map(|node| format!("dflash-{test}-{}-{node}", std::process::id()));
        let machines = Self { names };
        if let Err(reason) = machines.wire() {
            println!("skipped: no network namespaces here ({reason})");
            return None;
        }
        Some(machines)
    }

    fn wire(&self) -> Result<(), String> {
        let [a, b] = &self.names;
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        ip(&format!("link add cable netns {a} type veth peer name cable netns {b}"))?;
        for (node, name) in self.names.iter().enumerate() {
            let address = node + 1;
            ip(&format!("-n {name} link add other type veth peer name far"))?;
            ip(&format!("-n {name} addr add 10.77.0.{address}/24 dev cable"))?;
            ip(&format!("-n {name} addr add 10.88.{address}.1/24 dev other"))?;
            for link in ["lo", "cable", "other", "far"] {
                ip(&format!("-n {name} link set {link} up"))?;
            }
            ip(&format!("-n {name} route add default via 10.88.{address}.2"))?;
        }
        Ok(())
    }

    /// The launcher of a node with two ranks.
    fn start(&self, world: &World, save: &str, node: usize, more: &[&str]) -> Running {
        let number = node.to_string();
        let place = ["--nnodes", "2", "--node-rank", &number, "--rdzv-endpoint", ENDPOINT];
        let command = world.command(save, &[&place[..], &["--nproc", "2"], more].concat());
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.names[node]]).arg(command.get_program());
        inside.args(command.get_args()).envs(command.get_envs().filter_map(|(k, v)| Some((k, v?))));
        Running::start(&mut inside)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let mut command = Command::new("ip");
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

#[test]
fn two_machines_train_as_one_process() {
    let Some(machines) = Machines::new("train") else { return };
    let world = World::new();
    let one = world.train("one", &["--gradient-accumulation-steps", "4"]);
    assert!(one.success(), "{}", one.stderr);
    let nodes = [1, 0].map(|node| machines.start(&world, "two", node, &[]));
    for node in nodes {
        let run = node.end();
        assert!(run.success(), "{}", run.stderr);
    }
    assert_same_losses(&losses(&world.path("two")), &losses(&world.path("one")));
}

#[test]
fn a_rank_killed_on_one_machine_is_named_and_started_again_on_both() {
    let Some(machines) = Machines::new("kill") else { return };
    let world = World::new();
    let one = world.train("one", &["--gradient-accumulation-steps", "4", "--epochs", "40"]);
    assert!(one.success(), "{}", one.stderr);
    let more = ["--epochs", "40", "--save-every", "5", "--max-restarts", "1"];
    let [mut first, second] = [0, 1].map(|node| machines.start(&world, "two", node, &more));
    first.await_step(&world.path("two"), 12);
    send("-KILL", second.ranks()[1]);
    let [first, second] = [first.end(), second.end()];
    for run in [&first, &second] {
        assert!(run.success(), "{}", run.stderr);
        assert!(run.stderr.contains("rank 3 (node 1, "), "{}", run.stderr);
        assert!(run.stderr.contains("(restart 1 of 1)"), "{}", run.stderr);
    }
    assert!(first.stderr.contains("node 1 reports: rank 3"), "{}", first.stderr);
    assert_same_losses(&losses(&world.path("two")), &losses(&world.path("one")));
}

/// Documented time for a job whose nodes lost each other, beyond --collective-timeout.
const LOST: Duration = Duration::from_secs(60);

#[test]
fn a_cut_link_ends_both_machines_in_plain_words() {
    let Some(machines) = Machines::new("cut") else { return };
    let world = World::new();
    let more = ["--epochs", "4000", "--collective-timeout", "5"];
    let [mut first, second] = [0, 1].map(|node| machines.start(&world, "out", node, &more));
    first.await_step(&world.path("out"), 5);
    // Packets are dropped silently from now on.
    ip(&format!("-n {} link set cable down", machines.names[1])).unwrap();
    let cut = Instant::now();
    for node in [first, second] {
        let run = node.end();
        assert!(cut.elapsed() < Duration::from_secs(5) + LOST, "took {:?}", cut.elapsed());
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains("no answer from a peer "), "{}", run.stderr);
        assert_no_traces(&run);
    }
}

#[test]
fn the_end_of_a_launcher_is_told_in_plain_words() {
    let world = World::new();
    let endpoint = format!("127.0.0.1:{}", free_port());
    let [mut first, second] = ["0", "1"].map(|node| {
        let place = ["--nnodes", "2", "--node-rank", node, "--rdzv-endpoint", &endpoint];
        let more = ["--nproc", "1", "--epochs", "4000", "--collective-timeout", "5"];
        Running::start(&mut world.command("out", &[&place[..], &more].concat()))
    });
    first.await_step(&world.path("out"), 5);
    send("-KILL", first.id());
    let run = second.end();
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("a peer closed the connection"), "{}", run.stderr);
    assert_no_traces(&run);
}

#[test]
fn a_rank_without_a_launcher_says_that_its_peer_is_gone() {
    let world = World::new();
    for killed in [0, 1] {
        let save = format!("out-{killed}");
        let more = ["--epochs", "4000", "--collective-timeout", "5"];
        let mut ranks = start_workers(&world, &save, &more, 2);
        ranks[0].await_step(&world.path(&save), 5);
        send("-KILL", ranks[killed].id());
        let run = ranks.remove(1 - killed).end();
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains("a peer closed the connection"), "{}", run.stderr);
        assert_no_traces(&run);
    }
}

/// Asserts that no C++ stack trace reaches the user.
fn assert_no_traces(run: &Run) {
    for trace in ["frame #", "Exception raised", ".cpp:", ".cc:", "[c10d]"] {
        assert!(!run.stderr.contains(trace), "{trace}: {}", run.stderr);
    }
}
