//! The target against Hugging Face's own outputs, and each way of running it against the others.
//!
//! Golden folder: `DFLASH_GOLDEN`, else `../shared/golden` beside the repository; without one the
//! parity test says so and passes.

use std::path::{Path, PathBuf};

use dflash_model::Error;
use dflash_model::checkpoint::TensorFile;
use dflash_model::target::{Target, TargetConfig, TargetOptions};
use tch::{Device, Kind, Tensor, no_grad};

const F32: TargetOptions = TargetOptions { device: Device::Cpu, dtype: Kind::Float };

fn golden_targets() -> Vec<PathBuf> {
    let golden = std::env::var_os("DFLASH_GOLDEN").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden"),
        PathBuf::from,
    );
    let Ok(entries) = std::fs::read_dir(golden.join("targets")) else {
        eprintln!("skipped: no golden vectors under {}; set DFLASH_GOLDEN", golden.display());
        return Vec::new();
    };
    let mut dirs: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    dirs.retain(|dir| dir.is_dir());
    dirs.sort();
    dirs
}

/// Largest difference relative to the largest expected value.
fn relative_error(actual: &Tensor, expected: &Tensor) -> f64 {
    let scale = expected.abs().max().double_value(&[]);
    (actual - expected).abs().max().double_value(&[]) / scale
}

fn assert_close(actual: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(actual.size(), expected.size(), "{what}");
    let error = relative_error(actual, expected);
    assert!(error <= 1e-5, "{what} differs by {error:e}");
}

#[test]
fn hidden_states_and_logits_are_hugging_faces() {
    for dir in golden_targets() {
        match Target::load(&dir, &F32) {
            Ok(target) => check_golden(&dir, &target),
            Err(error @ Error::Architecture { .. }) => eprintln!("skipped: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}

fn check_golden(dir: &Path, target: &Target) {
    let golden = TensorFile::open(&dir.join("golden.safetensors")).unwrap();
    let [ids, states, logits] =
        ["input_ids", "hidden_states", "logits"].map(|name| golden.any_tensor(name).unwrap());
    let ids = ids.flatten(0, -1);
    let all: Vec<u32> = (0..=target.num_layers() as u32).collect();
    let captures = target.forward_packed(&ids, &[0, ids.size()[0]], &all);
    for (id, capture) in captures.iter().enumerate() {
        let error = relative_error(capture, &states.get(id as i64));
        assert!(error <= 1e-4, "{}: state {id} differs by {error:e}", dir.display());
    }
    let error = relative_error(&target.logits(captures.last().unwrap()), &logits);
    assert!(error <= 1e-4, "{}: logits differ by {error:e}", dir.display());
    eprintln!("checked: {} (logits to {error:.1e})", dir.display());
}

/// A small model whose second layer slides, to meet every mask.
fn small_config() -> TargetConfig {
    let mut config = TargetConfig::qwen3(32, 3, 50);
    config.windows[1] = Some(6);
    config
}

/// A target without gradients, with weights large enough to make attention matter.
fn small_target(config: TargetConfig) -> Target {
    let target = Target::random(config, 5, Device::Cpu);
    no_grad(|| {
        for (name, mut parameter) in target.parameters() {
            if name.contains("proj") {
                let _ = parameter.g_mul_scalar_(8.0);
            }
        }
    });
    let dir = tempfile::tempdir().unwrap();
    target.save(dir.path(), Kind::Float).unwrap();
    Target::load(dir.path(), &F32).unwrap()
}

fn random_ids(length: i64, seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randint(50, [length], (Kind::Int64, Device::Cpu))
}

#[test]
fn cached_chunks_equal_the_whole() {
    let target = small_target(small_config());
    let ids = random_ids(23, 1);
    let whole = target.forward_packed(&ids, &[0, 23], &[0, 2, 3]);
    for chunks in [vec![23], vec![1; 23], vec![10, 4, 1, 8], vec![3, 20]] {
        let mut cache = target.new_cache(30);
        let mut start = 0;
        for chunk in chunks {
            let output = target.forward_cached(&ids.narrow(0, start, chunk), &mut cache, &[0, 2]);
            let expected = |state: usize| whole[state].narrow(0, start, chunk);
            assert_close(&output.captures[0], &expected(0), "state 0");
            assert_close(&output.captures[1], &expected(1), "state 2");
            assert_close(&output.hidden_td, &expected(2), "last state");
            start += chunk;
        }
        assert_eq!(cache.len(), 23);
    }
}

#[test]
fn a_truncated_cache_forgets() {
    let target = small_target(small_config());
    let (ids, other) = (random_ids(20, 2), random_ids(9, 3));
    let mut cache = target.new_cache(24);
    target.forward_cached(&ids.narrow(0, 0, 12), &mut cache, &[]);
    target.forward_cached(&other, &mut cache, &[]);
    cache.truncate(12);
    let again = target.forward_cached(&ids.narrow(0, 12, 8), &mut cache, &[]);
    let whole = target.forward_packed(&ids, &[0, 20], &[3]);
    assert_close(&again.hidden_td, &whole[0].narrow(0, 12, 8), "after truncation");
    cache.truncate(100);
    assert_eq!(cache.len(), 20);
}

#[test]
fn packed_documents_do_not_see_each_other() {
    let target = small_target(small_config());
    let ids = random_ids(31, 4);
    let starts = [0, 7, 7, 8, 31];
    let packed = target.forward_packed(&ids, &starts, &[3, 1]);
    for bounds in starts.windows(2).filter(|bounds| bounds[0] < bounds[1]) {
        let (start, length) = (bounds[0], bounds[1] - bounds[0]);
        let alone = target.forward_packed(&ids.narrow(0, start, length), &[0, length], &[3, 1]);
        assert_close(&packed[0].narrow(0, start, length), &alone[0], "last state");
        assert_close(&packed[1].narrow(0, start, length), &alone[1], "state 1");
    }
}

#[test]
fn a_batch_decodes_as_each_sequence_alone() {
    let target = small_target(small_config());
    let ids: Vec<i64> = Vec::try_from(random_ids(40, 6)).unwrap();
    let mut sequences: Vec<Vec<i64>> =
        vec![ids[0..5].to_vec(), ids[5..16].to_vec(), ids[16..17].to_vec()];
    let mut cache = target.new_batch_cache(4, 32);
    let prompts: Vec<&[i64]> = sequences.iter().map(Vec::as_slice).collect();
    let logits = target.prefill_batch(&prompts, &mut cache);
    check_last_logits(&target, &sequences, &logits);
    for step in 0..8 {
        if step == 3 {
            cache.swap_remove(0);
            sequences.swap_remove(0);
        }
        if step == 5 {
            sequences.push(ids[17..24].to_vec());
            let _logits = target.prefill_batch(&[&ids[17..24]], &mut cache);
        }
        let next: Vec<i64> = (0..sequences.len()).map(|slot| ids[24 + step + slot]).collect();
        sequences.iter_mut().zip(&next).for_each(|(sequence, id)| sequence.push(*id));
        let logits = target.decode_batch(&next, &mut cache);
        check_last_logits(&target, &sequences, &logits);
    }
}

fn check_last_logits(target: &Target, sequences: &[Vec<i64>], logits: &Tensor) {
    for (slot, sequence) in sequences.iter().enumerate() {
        let ids = Tensor::from_slice(sequence);
        let length = ids.size()[0];
        let last = &target.forward_packed(&ids, &[0, length], &[3])[0].narrow(0, length - 1, 1);
        assert_close(&logits.narrow(0, slot as i64, 1), &target.logits(last), "batch logits");
    }
}

#[test]
fn saved_in_bf16_or_untied_it_loads_the_same() {
    let dir = tempfile::tempdir().unwrap();
    for (tied, kind, tolerance) in
        [(true, Kind::Float, 0.0), (false, Kind::Float, 0.0), (true, Kind::BFloat16, 0.02)]
    {
        let mut config = small_config();
        config.tie_word_embeddings = tied;
        config.eos_token_ids = vec![3];
        let target = Target::random(config.clone(), 9, Device::Cpu);
        target.save(dir.path(), kind).unwrap();
        let loaded = Target::load(dir.path(), &F32).unwrap();
        assert_eq!(loaded.config(), &config);
        let ids = random_ids(9, 8);
        let run = |target: &Target| {
            no_grad(|| target.logits(&target.forward_packed(&ids, &[0, 9], &[3])[0]))
        };
        let error = relative_error(&run(&loaded), &run(&target));
        assert!(error <= tolerance + 1e-6, "tied {tied} {kind:?}: {error}");
    }
}

#[test]
fn gradients_of_a_trainable_target_predict_the_loss() {
    let target = Target::random(small_config(), 11, Device::Cpu);
    let ids = random_ids(16, 12);
    let loss = || {
        let hidden = &target.forward_packed(&ids, &[0, 9, 16], &[3])[0];
        target.logits(hidden).narrow(0, 0, 15).cross_entropy_for_logits(&ids.narrow(0, 1, 15))
    };
    loss().backward();
    for (name, mut parameter) in target.parameters() {
        let gradient = parameter.grad();
        let norm = gradient.norm().double_value(&[]);
        assert!(norm > 0.0, "{name} has no gradient");
        let step = 1e-2 / norm;
        let moved = no_grad(|| {
            let original = parameter.detach().copy();
            let at = |sign: f64, parameter: &mut Tensor| {
                parameter.copy_(&(&original + &gradient * (sign * step)));
                loss().double_value(&[])
            };
            let moved = at(1.0, &mut parameter) - at(-1.0, &mut parameter);
            parameter.copy_(&original);
            moved
        });
        let predicted = 2.0 * step * norm * norm;
        // float32 losses near 4 carry 1e-6 of rounding.
        let error = (moved - predicted).abs();
        assert!(error <= 0.05 * predicted + 4e-6, "{name}: {moved:e}, predicted {predicted:e}");
    }
}

#[test]
fn broken_directories_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let message = || Target::load(dir.path(), &F32).unwrap_err().to_string();
    assert!(message().contains("has no config.json"));
    let target = Target::random(small_config(), 1, Device::Cpu);
    target.save(dir.path(), Kind::Float).unwrap();
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert!(message().contains("has no model.safetensors"));
    let mut deeper = small_config();
    deeper.num_hidden_layers = 2;
    deeper.windows.pop();
    Target::random(deeper, 1, Device::Cpu).save(dir.path(), Kind::Float).unwrap();
    target.save(&dir.path().join("other"), Kind::Float).unwrap();
    std::fs::copy(dir.path().join("other/config.json"), dir.path().join("config.json")).unwrap();
    assert!(message().contains("has no tensor model.layers.2."), "{}", message());
}
