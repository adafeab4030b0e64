//! Ranks started with different settings: each reports the difference, all exit, without retries.

use crate::running::{Running, free_port};
use crate::world::{Run, World};

/// For ranks that would otherwise wait for each other for half an hour.
const LIMITS: [&str; 4] = ["--collective-timeout", "30", "--join-timeout", "60"];

/// The two launchers of a job; the second has other flags or variables.
fn launch(world: &World, flags: [&[&str]; 2], variables: &[(&str, &str)]) -> [Run; 2] {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let nodes = [0, 1].map(|node: usize| {
        let number = node.to_string();
        let place = ["--nnodes", "2", "--node-rank", &number, "--rdzv-endpoint", &endpoint];
        let more = ["--max-restarts", "2", "--nproc", "1", "--max-steps", "3"];
        let own: Vec<&str> = more
            .chunks(2)
            .filter(|pair| !flags[node].contains(&pair[0]))
            .flatten()
            .copied()
            .chain(flags[node].iter().copied())
            .collect();
        let mut command = world.command("out", &[&place[..], &LIMITS, &own].concat());
        if node == 1 {
            command.envs(variables.iter().copied());
        }
        Running::start(&mut command)
    });
    nodes.map(Running::end)
}

fn check(world: &World, flags: [&[&str]; 2], variables: &[(&str, &str)], expected: &str) {
    let [first, second] = launch(world, flags, variables);
    for run in [&first, &second] {
        assert_eq!(run.code, Some(1), "{expected}: {}", run.stderr);
        assert!(run.stderr.contains("the ranks were not started alike"), "{}", run.stderr);
        assert!(run.stderr.contains(expected), "{expected} is not in {}", run.stderr);
        assert!(!run.stderr.contains("starting all ranks again"), "{}", run.stderr);
        for trace in ["frame #", "Exception raised", ".cpp:"] {
            assert!(!run.stderr.contains(trace), "{}", run.stderr);
        }
    }
    assert!(!world.path("out").exists(), "nothing was begun");
}

#[test]
fn launchers_with_other_settings_name_key_values_and_ranks() {
    let world = World::new();
    let differ = |flag: &str, one: &str, other: &str| {
        let expected = format!("{flag} is {one} on rank 0 and {other} on rank 1");
        check(&world, [&[flag, one], &[flag, other]], &[], &expected);
    };
    differ("--lr", "0.01", "0.001");
    differ("--seed", "0", "7");
    differ("--loss", "ce", "kl");
    differ("--optimizer", "adamw", "muon");
    differ("--gradient-accumulation-steps", "1", "2");
    differ("--max-grad-norm", "1.0", "0.5");
    differ("--max-steps", "3", "9");
    differ("--zero", "0", "1");
    differ("--num-layers", "2", "3");
}

#[test]
fn launchers_with_other_data_targets_or_threads_are_refused() {
    let world = World::new();
    let other = World::with_mask(|_, t| t >= 5);
    let path = |world: &World, name: &str| world.path(name).to_string_lossy().into_owned();
    let (own, foreign) = (path(&world, "data"), path(&other, "data"));
    let flags: [&[&str]; 2] = [&["--data-path", &own], &["--data-path", &foreign]];
    check(&world, flags, &[], "the fingerprint of the data (--data-path) is ");

    // The same configuration, with one weight changed.
    let target = path(&other, "target");
    let weights = other.path("target").join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let own = path(&world, "target");
    let flag = "--verifier-name-or-path";
    check(&world, [&[flag, &own], &[flag, &target]], &[], "the identity of the target");

    let threads = "the number of CPU threads (OMP_NUM_THREADS) is 1 on rank 0 and 2 on rank 1";
    check(&world, [&[], &[]], &[("OMP_NUM_THREADS", "2")], threads);
}

#[test]
fn what_nodes_may_have_of_their_own_does_not_count() {
    let (world, other) = (World::new(), World::new());
    let path = |name: &str| other.path(name).to_string_lossy().into_owned();
    let (data, target, states) = (path("data"), path("target"), path("states"));
    let own = ["--data-path", &data, "--verifier-name-or-path", &target];
    let more = ["--hidden-states-path", &states, "--max-in-flight", "3", "--window-mib", "9"];
    for run in launch(&world, [&[], &[&own[..], &more].concat()], &[]) {
        assert!(run.success(), "{}", run.stderr);
    }
}

#[test]
fn ranks_of_other_launchers_compare_as_well() {
    let world = World::new();
    let port = free_port().to_string();
    let schemes: [[(&str, &str); 2]; 2] = [
        [("RANK", "WORLD_SIZE"), ("", "")],
        [("SLURM_PROCID", "SLURM_NTASKS"), ("SLURM_LOCALID", "")],
    ];
    for [(rank_name, size_name), (local_name, _)] in schemes {
        let ranks = ["0.01", "0.02", "0.01"].iter().enumerate().map(|(rank, lr)| {
            let number = rank.to_string();
            let mut command = world.command("out", &[&LIMITS[..], &["--lr", lr]].concat());
            command.env(rank_name, &number).env(size_name, "3");
            if !local_name.is_empty() {
                command.env(local_name, &number);
            }
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            Running::start(&mut command)
        });
        for run in ranks.collect::<Vec<_>>().into_iter().map(Running::end) {
            assert_eq!(run.code, Some(1), "{}", run.stderr);
            let expected = "--lr is 0.01 on ranks 0, 2 and 0.02 on rank 1";
            assert!(run.stderr.contains(expected), "{}", run.stderr);
        }
    }
}
