//! Hidden states of documents, with the product types that targets use. The rounding of matmuls is
//! a process-wide setting changed by these tests, so they run in their own process, one at a time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dflash_kernels::cpu_multiplies_bf16;
use dflash_settings::Dtype;
use dflash_target::{PackedPrompts, Prefill, PrefillOptions, Target, TargetConfig, TargetOptions};
use dflash_tensor::DeviceKind;
use dflash_test_support::alone;
use dflash_torch_sys::with_products;
use tch::{Device, Kind, Tensor};

const VOCABULARY: i64 = 512;
const LAYER_IDS: [u32; 3] = [0, 1, 2];

fn prompt(tokens: usize, seed: usize) -> Vec<i64> {
    (0..tokens).map(|token| ((token * seed + 3) as i64) % VOCABULARY).collect()
}

/// Saves a target whose matrices span several blocks of blocked matmuls.
fn saved(dir: &Path, kind: Kind) {
    let target = Target::random(TargetConfig::qwen3(256, 3, VOCABULARY), 7, Device::Cpu);
    target.save(dir, kind).unwrap();
}

fn load(dir: &Path, asked: Dtype, kind: Kind) -> Prefill {
    let options = PrefillOptions {
        place: DeviceKind { device: Device::Cpu, kind },
        asked,
        highest: Some(2),
        embedding_vh: None,
    };
    Prefill::load(dir, &options).unwrap()
}

/// The states of each prompt by layer, from one batch.
fn states(prefill: &Prefill, prompts: &[Vec<i64>]) -> Vec<Vec<Tensor>> {
    let packed = PackedPrompts::new(prompts.iter().map(Vec::as_slice));
    let states = prefill.states(&packed, &LAYER_IDS).unwrap();
    let own = |bounds: &[i64]| {
        states.iter().map(|state| state.narrow(0, bounds[0], bounds[1] - bounds[0])).collect()
    };
    packed.document_starts.windows(2).map(own).collect()
}

#[test]
fn a_pass_that_nobody_waits_for_ends_before_its_next_layer() {
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path(), Kind::Float);
    let prefill = load(dir.path(), Dtype::Float32, Kind::Float);
    let long = prompt(4000, 3);
    let packed = PackedPrompts::new(std::iter::once(long.as_slice()));
    let timed = |stop: bool| {
        let begun = Instant::now();
        let states = prefill.states_unless(&AtomicBool::new(stop), &packed, &LAYER_IDS).unwrap();
        (states.is_some(), begun.elapsed())
    };
    let (whole, took) = timed(false);
    let (stopped, after) = timed(true);
    assert!(whole && !stopped);
    assert!(after < took / 4, "{after:?} of {took:?}");
}

/// A server's answer must not depend on concurrent requests.
#[test]
fn a_prompt_has_the_same_states_in_every_batch() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path(), Kind::BFloat16);
    let lengths = [37, 1, 200, 9, 64, 33, 2, 300, 5, 96];
    let prompts: Vec<Vec<i64>> =
        lengths.iter().enumerate().map(|(seed, &tokens)| prompt(tokens, 2 * seed + 3)).collect();
    for (asked, kind) in [
        (Dtype::Auto, Kind::Float),
        (Dtype::Float32, Kind::Float),
        (Dtype::Bfloat16, Kind::BFloat16),
    ] {
        let prefill = load(dir.path(), asked, kind);
        let one = |prompt: &Vec<i64>| states(&prefill, std::slice::from_ref(prompt)).remove(0);
        let alone: Vec<Vec<Tensor>> = prompts.iter().map(one).collect();
        for count in [2, 5, 10] {
            for first in 0..=prompts.len() - count {
                let own = states(&prefill, &prompts[first..first + count]);
                for (number, own) in own.iter().enumerate() {
                    let number = first + number;
                    let what = format!("{asked:?}, prompt {number} of {count} from {first}");
                    assert_eq!(own, &alone[number], "{what}");
                }
            }
        }
    }
}

#[test]
fn a_part_of_the_target_gives_what_the_whole_gives() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path(), Kind::Float);
    let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
    let target = Target::load(dir.path(), &options).unwrap();
    let embedding_vh = target.embed(&Tensor::arange(VOCABULARY, (Kind::Int64, Device::Cpu)));
    let options = PrefillOptions {
        place: DeviceKind::CPU_F32,
        asked: Dtype::Float32,
        highest: Some(2),
        embedding_vh: Some(&embedding_vh),
    };
    let part = Prefill::load(dir.path(), &options).unwrap();
    assert!(part.place().ends_with(" in float32"), "{}", part.place());
    let whole = PrefillOptions { highest: None, embedding_vh: None, ..options };
    let whole = Prefill::load(dir.path(), &whole).unwrap();
    let prompts = [prompt(40, 5), prompt(290, 7)];
    assert_eq!(states(&part, &prompts), states(&whole, &prompts));
}

#[test]
fn other_products_are_as_they_were_after_work_and_after_a_panic() {
    let _alone = alone();
    tch::manual_seed(3);
    let x = Tensor::randn([256, 256], (Kind::Float, Device::Cpu));
    let before = x.mm(&x);
    let rounded = with_products(true, || x.mm(&x)).unwrap();
    assert!(!cpu_multiplies_bf16() || rounded != before, "they are rounded where that is fast");
    assert_eq!(x.mm(&x), before);
    let inner = || with_products(false, || x.mm(&x)).unwrap();
    assert_eq!(with_products(true, inner).unwrap(), before);
    let panicking = || with_products(true, || panic!("a panic (part of a test)"));
    assert!(catch_unwind(AssertUnwindSafe(panicking)).is_err());
    assert_eq!(x.mm(&x), before);
}
