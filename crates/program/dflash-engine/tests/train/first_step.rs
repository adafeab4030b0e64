//! Runs that end before training anything leave nothing that could be mistaken for a draft or
//! obstruct the corrected command.

use std::time::Duration;

use crate::running::{Running, free_port, send};
use crate::world::{World, sorted_checkpoints};

/// What engines and `--resume` look for in a run's directory.
fn assert_nothing_is_left(world: &World, save: &str) {
    assert_eq!(sorted_checkpoints(&world.path(save)), [""; 0]);
    for name in ["latest", "best", "config.json", "model.safetensors"] {
        assert!(!world.path(save).join(name).is_symlink(), "{name}");
        assert!(!world.path(save).join(name).exists(), "{name}");
    }
}

#[test]
fn a_signal_before_the_first_step_saves_nothing_and_blocks_nothing() {
    let world = World::new();
    let endpoint = format!("http://127.0.0.1:{}", free_port());
    let nowhere = world.path("nowhere").display().to_string();
    let waits = ["--endpoint", &endpoint, "--hidden-states-path", &nowhere];
    let waits = [&waits[..], &["--on-missing", "generate", "--wait-for-server", "600"]].concat();
    for (save, ranks, signal, code) in
        [("int", "1", "-INT", 130), ("term", "1", "-TERM", 143), ("both", "2", "-TERM", 143)]
    {
        let mut run =
            Running::start(&mut world.command(save, &[&waits[..], &["--nproc", ranks]].concat()));
        run.await_said("waiting", 1);
        std::thread::sleep(Duration::from_millis(200));
        send(signal, run.id());
        let run = run.end();
        assert_eq!(run.code, Some(code), "{save}: {}", run.stderr);
        assert!(run.stderr.contains("there was nothing to save"), "{save}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{save}");
        assert_nothing_is_left(&world, save);
    }
    for (save, more) in [("int", &["--lr", "0.02"][..]), ("term", &["--resume-or-start"])] {
        let run = world.train(save, &[more, &["--max-steps", "2"]].concat());
        assert!(run.success(), "{save}: {}", run.stderr);
        assert_eq!(sorted_checkpoints(&world.path(save)), ["step-000002"]);
    }
}

#[test]
fn a_run_with_nothing_to_learn_from_saves_nothing() {
    let world = World::with_mask(|_, _| false);
    let run = world.train("out", &["--save-every", "1"]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("had no supervised slot"), "{}", run.stderr);
    assert_nothing_is_left(&world, "out");
}
