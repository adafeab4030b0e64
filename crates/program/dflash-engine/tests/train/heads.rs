//! A draft with another head than DFlash's, from training to decoding: the Markov example.

use dflash_draft::Draft;
use tch::{Device, Kind};

use crate::resume::kill_after;
use crate::world::{Run, World};

/// Three steps between saves; the table of previous tokens has three numbers per token.
const MARKOV: [&str; 8] =
    ["--speculator-type", "markov", "--markov-rank", "3", "--max-steps", "6", "--save-every", "3"];

fn succeed(world: &World, save: &str, more: &[&str]) -> Run {
    let run = world.train(save, &[&MARKOV[..], more].concat());
    assert!(run.success(), "{more:?}: {}", run.stderr);
    run
}

fn load(world: &World, save: &str) -> Draft {
    Draft::load(&world.path(save).join("step-000006"), Device::Cpu, Kind::Float).unwrap()
}

#[test]
fn a_run_learns_the_term_and_goes_on_where_it_stopped() {
    let world = World::new();
    succeed(&world, "whole", &[]);
    let gains: Vec<f64> = world
        .lines("whole", "metrics.jsonl")
        .iter()
        .map(|line| line["head"]["markov_gain"].as_f64().unwrap())
        .collect();
    // W2 starts at zero, and training improves it
    assert_eq!(gains[0], 0.0);
    assert!(gains.len() == 6 && gains[5] > 1e-3, "{gains:?}");
    let draft = load(&world, "whole");
    let w2 = draft.layout().parameters().last().unwrap();
    assert_eq!((&*w2.name, &*w2.shape), ("markov_head.markov_w2.weight", &[64, 3][..]));
    assert!(w2.view(draft.flat()).abs().max().double_value(&[]) > 0.0);

    succeed(&world, "parts", &[]);
    kill_after(&world, "parts", "step-000003");
    succeed(&world, "parts", &["--resume"]);
    assert!(world.state("whole", "step-000006") == world.state("parts", "step-000006"));
    // the head is the run's, unless a flag requests another
    let bare = world.train("whole", &["--resume", "--max-steps", "6"]);
    assert!(bare.success(), "{}", bare.stderr);
    for (flags, told) in [
        (["--speculator-type", "dflash"], "--speculator-type markov, this run asks for dflash"),
        (["--markov-rank", "4"], "--markov-rank 3, this run asks for 4"),
    ] {
        let other = world.train("whole", &[&["--resume", "--max-steps", "6"], &flags[..]].concat());
        assert_eq!(other.code, Some(1), "{}", other.stderr);
        assert!(other.stderr.contains(told), "{}", other.stderr);
    }
}

#[test]
fn ranks_muon_and_a_pruned_vocabulary_take_the_tables_along() {
    let world = World::new();
    let more = ["--nproc", "2", "--zero", "1", "--optimizer", "muon", "--draft-vocab-size", "40"];
    succeed(&world, "muon", &more);
    let draft = load(&world, "muon");
    let shapes: Vec<_> = draft.layout().parameters().iter().rev().take(2).collect();
    assert_eq!((&*shapes[0].shape, &*shapes[1].shape), (&[40, 3][..], &[64, 3][..]));
    assert!(world.eval(&world.path("muon"))["acceptance_length"].as_f64().unwrap() >= 1.0);
    // another run's head is reused, and one of another rank starts fresh
    let warm = world.path("muon").to_string_lossy().into_owned();
    let flags = ["--from-pretrained", &*warm, "--max-steps", "1"];
    for (save, more, started) in
        [("warm", &[][..], false), ("warm2", &["--markov-rank", "2"], true)]
    {
        let run = world.train(save, &[&flags[..], more].concat());
        assert!(run.success(), "{}", run.stderr);
        assert_eq!(run.stderr.contains("starts fresh"), started, "{}", run.stderr);
        let config = std::fs::read_to_string(world.path(save).join("step-000001/config.json"));
        assert!(config.unwrap().contains("markov_rank"), "the kind is that of the draft");
    }
}

#[test]
fn a_markov_draft_decodes_and_no_layout_of_an_engine_takes_it() {
    let world = World::new();
    succeed(&world, "out", &[]);
    let report = world.eval(&world.path("out"));
    assert!(report["acceptance_length"].as_f64().unwrap() >= 1.0, "{report}");
    let path = |name: &str| world.path(name).to_string_lossy().into_owned();
    let (target, draft, output) = (path("target"), path("out"), path("exported"));
    for format in ["zlab", "speculators", "gguf"] {
        let line = ["export", "--target", &target, "--draft", &draft, "--output", &output];
        let run = world.engine(&[&line[..], &["--format", format]].concat());
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(
            run.stderr.contains("no engine supports the head of this draft, markov"),
            "{}",
            run.stderr
        );
    }
}
