//! Parallel targets give the results of one process. Here a rank is a thread and a sum is exchanged
//! between threads; `dflash-engine`'s test of this name uses real processes.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use dflash_golden::{Entry, entries};
use dflash_settings::Dtype;
use dflash_target::parallel::{Grid, Passing, States, Sum, TargetPart};
use dflash_target::{PackedPrompts, Prefill, PrefillOptions, TargetConfig};
use dflash_tensor::checkpoint::TensorFile;
use dflash_tensor::{DeviceKind, on_loading};
use dflash_test_support::alone;
use tch::Tensor;

/// The vectors that cannot be divided by both two and four ranks, because of their delta-layer
/// heads (1 or 2) or experts (6). All others have four query heads, and one, two or four key heads.
const FEWER: [(&str, &[usize]); 7] = [
    ("qwen3_moe", &[2]),
    ("gemma4_moe", &[2]),
    ("qwen3_5", &[2]),
    ("qwen3_5_moe", &[2]),
    ("qwen3_5_nested", &[2]),
    ("qwen3_next", &[2]),
    ("qwen3_next_dense_layer", &[]),
];

/// Timeout for waiting on other ranks, one of which may have panicked.
const PATIENCE: Duration = Duration::from_secs(60);

const OPTIONS: PrefillOptions<'_> = PrefillOptions {
    place: DeviceKind::CPU_F32,
    asked: Dtype::Float32,
    highest: None,
    embedding_vh: None,
};

/// Sums the ranks of a stage.
#[derive(Debug)]
struct Meeting {
    ranks: usize,
    round: Mutex<Round>,
    met: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: usize,
    arrived: usize,
    sum: Option<Tensor>,
    /// The previous round's sum, kept until all ranks have read it and met again.
    last: Option<Tensor>,
}

impl Meeting {
    fn of(ranks: usize) -> Arc<Self> {
        Arc::new(Self { ranks, round: Mutex::default(), met: Condvar::new() })
    }
}

impl Sum for Meeting {
    fn at(&self, _number: usize) {}

    fn sum(&self, partial: &Tensor) {
        let mut round = self.round.lock().unwrap();
        let number = round.number;
        let sum = round.sum.take().map_or_else(|| partial.copy(), |sum| sum + partial);
        round.sum = Some(sum);
        round.arrived += 1;
        if round.arrived == self.ranks {
            round.last = round.sum.take();
            (round.number, round.arrived) = (number + 1, 0);
            self.met.notify_all();
        }
        let waits = |round: &mut Round| round.number == number;
        let (round, late) = self.met.wait_timeout_while(round, PATIENCE, waits).unwrap();
        assert!(!late.timed_out(), "a rank did not come to a sum");
        partial.shallow_clone().copy_(round.last.as_ref().unwrap());
    }
}

/// States of all layer ids from one process, for `prompts`.
fn whole(dir: &Path, prompts: &PackedPrompts) -> Vec<Tensor> {
    let prefill = Prefill::load(dir, &OPTIONS).unwrap();
    let last = prefill.config().num_hidden_layers as u32;
    prefill.states(prompts, &(0..=last).collect::<Vec<_>>()).unwrap()
}

/// The same from the ranks of `grid`, from each part of a stage, since all have the whole states.
fn parallel(dir: &Path, grid: Grid, prompts: &PackedPrompts) -> Vec<States> {
    let mut bundles: Vec<Option<Passing>> = (0..grid.tensor).map(|_| None).collect();
    let mut states: Vec<States> = (0..grid.tensor).map(|_| Vec::new()).collect();
    for stage in 0..grid.pipeline {
        let meeting = Meeting::of(grid.tensor);
        let run = |part: usize, arrived: Option<Passing>| {
            let sums = (grid.tensor > 1).then(|| meeting.clone() as Arc<dyn Sum>);
            let part = TargetPart::load(dir, &OPTIONS, grid, grid.rank(stage, part), sums).unwrap();
            let last = part.config().num_hidden_layers;
            let ids: Vec<u32> = (0..=last as u32).collect();
            part.run(prompts, &ids, last, arrived).unwrap()
        };
        let passed: Vec<(Passing, States)> = std::thread::scope(|scope| {
            let run = &run;
            let start = |(part, arrived)| scope.spawn(move || run(part, arrived));
            let ranks: Vec<_> = bundles.drain(..).enumerate().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for ((bundle, aux_states), states) in passed.into_iter().zip(&mut states) {
            bundles.push(Some(bundle));
            states.extend(aux_states);
        }
    }
    states
}

fn assert_same(what: &str, dir: &Path, grid: Grid, prompts: &PackedPrompts) {
    let expected = whole(dir, prompts);
    for (part, states) in parallel(dir, grid, prompts).iter().enumerate() {
        assert_eq!(states.len(), expected.len(), "{what}");
        for ((id, got), expected) in states.iter().zip(&expected) {
            let got = got.narrow(0, 0, expected.size()[0]);
            let scale = expected.abs().max().double_value(&[]);
            let off = (got - expected).abs().max().double_value(&[]);
            let place = format!("{what}, {grid:?}, part {part}, layer id {id}");
            assert!(off <= 1e-5 * scale.max(1.0), "{place}: off by {off} at a scale of {scale}");
        }
    }
}

/// Documents of these lengths, with token ids valid in every vector's vocabulary.
fn documents(lengths: &[i64]) -> PackedPrompts {
    let ids = |&length: &i64| (0..length).map(|token| (token * 7 + length) % 40).collect();
    let prompts: Vec<Vec<i64>> = lengths.iter().map(ids).collect();
    PackedPrompts::new(prompts.iter().map(Vec::as_slice))
}

fn vectors() -> impl Iterator<Item = Entry> {
    ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None))
}

/// The numbers of ranks in `possible` that divide the target's heads and widths.
fn numbers(dir: &Path, possible: Range<usize>) -> Vec<usize> {
    let config = TargetConfig::load(dir).unwrap();
    let allowed = |&tensor: &usize| Grid { pipeline: 1, tensor }.check(&config).is_ok();
    possible.filter(allowed).collect()
}

#[test]
fn parts_of_every_family_give_the_states_of_the_whole() {
    let _alone = alone();
    tch::set_num_threads(1);
    let prompts = documents(&[40, 9, 1]);
    let mut fewer = Vec::new();
    for Entry { name, path, own } in
        vectors().filter(|entry| TargetConfig::load(&entry.path).is_ok())
    {
        let numbers = numbers(&path, 2..9);
        for &tensor in &numbers {
            for pipeline in [1, 2] {
                assert_same(&name, &path, Grid { pipeline, tensor }, &prompts);
            }
        }
        if own && numbers != [2, 4] {
            fewer.push((name, numbers));
        }
    }
    let fewer: Vec<(&str, &[usize])> =
        fewer.iter().map(|(name, numbers)| (name.as_str(), numbers.as_slice())).collect();
    assert_eq!(fewer, FEWER);
}

/// Bytes read by the last load.
static READ: AtomicU64 = AtomicU64::new(0);

/// Compares bytes read: every element that a rank reports holding, plus only norms, biases and
/// convolutions, which are not counted.
#[test]
fn a_rank_holds_what_is_said() {
    let _alone = alone();
    on_loading(|loading| READ.store(loading.read, Ordering::Relaxed));
    for Entry { name, path, .. } in vectors() {
        let Ok(config) = TargetConfig::load(&path) else { continue };
        let file = TensorFile::open(&path.join("model.safetensors")).unwrap();
        let names = file.names();
        if names.iter().any(|name| name.ends_with("_scales") || name.ends_with("_inv")) {
            // Here the bytes read differ from the bytes held.
            continue;
        }
        let small =
            names.iter().map(|name| (name, file.shape(name).unwrap())).filter(|(name, shape)| {
                shape.len() == 1 || shape.contains(&1) || name.ends_with("bias")
            });
        let small: i64 = small.map(|(_, shape)| shape.iter().product::<i64>()).sum();
        for tensor in [1].into_iter().chain(numbers(&path, 2..9)) {
            for pipeline in [1, 2] {
                let grid = Grid { pipeline, tensor };
                for (stage, said) in grid.elements(&config).unwrap().into_iter().enumerate() {
                    let rank = grid.rank(stage, tensor - 1);
                    let _ = TargetPart::load(&path, &OPTIONS, grid, rank, None).unwrap();
                    let read = READ.load(Ordering::Relaxed) as f64 / 4.0;
                    let over = read - said;
                    let place = format!("{name}, {grid:?}, stage {stage}: {read} of {said}");
                    assert!((0.0..=small as f64).contains(&over), "{place}");
                }
            }
        }
    }
}

/// Some targets use other rotary frequencies for long documents.
#[test]
fn a_long_document_is_as_long_to_stages_and_parts() {
    let _alone = alone();
    tch::set_num_threads(1);
    let longrope = vectors().find(|entry| entry.name == "phi3_longrope").unwrap();
    // Its short frequencies apply up to 64 tokens.
    let prompts = documents(&[90, 64]);
    assert_same("longrope", &longrope.path, Grid { pipeline: 2, tensor: 1 }, &prompts);
}
