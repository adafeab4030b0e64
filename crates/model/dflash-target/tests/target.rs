//! The ways of running a target compared with each other; `parity` compares them with Hugging Face.

use std::path::Path;

use dflash_target::{
    DenseKind, SequencePart, Target, TargetConfig, TargetFacts, TargetIo, TargetOptions,
};
use dflash_tensor::Kernels;
use dflash_tensor::checkpoint::{TensorFile, write_safetensors};
use dflash_test_support::alone;
use tch::{Device, Kind, Tensor, no_grad};

const F32: TargetOptions = TargetOptions { device: Device::Cpu, dtype: Kind::Float };

/// Maximum difference relative to the largest expected value.
fn relative_error(actual: &Tensor, expected: &Tensor) -> f64 {
    let scale = expected.abs().max().double_value(&[]);
    (actual - expected).abs().max().double_value(&[]) / scale
}

fn assert_close(actual: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(actual.size(), expected.size(), "{what}");
    let error = relative_error(actual, expected);
    assert!(error <= 1e-5, "{what} differs by {error:e}");
}

/// A small model whose second layer slides, to cover every mask.
fn small_config() -> TargetConfig {
    TargetConfig::qwen3(32, 3, 50).with_dense(|dense| dense.windows[1] = Some(6))
}

/// One small model of every family, with all its biases.
fn family_configs() -> Vec<TargetConfig> {
    let change = |kind, qkv_bias, output_bias, mlp_bias| {
        small_config().with_dense(|dense| {
            (dense.qkv_bias, dense.output_bias, dense.mlp_bias) = (qkv_bias, output_bias, mlp_bias);
            dense.qk_norm = kind == DenseKind::Qwen3;
            dense.windows = vec![None; 3];
            dense.kind = kind;
        })
    };
    vec![
        small_config(),
        change(DenseKind::Qwen3, true, true, false),
        change(DenseKind::Qwen2, true, false, false),
        change(DenseKind::Llama, true, true, true),
        change(DenseKind::Mistral, false, false, false)
            .with_dense(|dense| dense.num_key_value_heads = 4),
        small_config().with_dense(|dense| {
            (dense.num_key_value_heads, dense.windows) = (1, vec![Some(4); 3]);
        }),
    ]
}

/// A target without gradients, with weights large enough to make attention matter.
fn small_target(config: TargetConfig) -> Target {
    let target = Target::random(config, 5, Device::Cpu);
    no_grad(|| {
        for (name, mut parameter) in target.parameters() {
            if name.ends_with("bias") {
                parameter.copy_(&(parameter.randn_like() * 0.3));
            } else if name.contains("proj") {
                let _ = parameter.g_mul_scalar_(8.0);
            } else if name.contains("norm") {
                parameter.copy_(&(parameter.rand_like() + 0.5));
            }
        }
    });
    let dir = tempfile::tempdir().unwrap();
    target.save(dir.path(), Kind::Float).unwrap();
    Target::load(dir.path(), &F32).unwrap()
}

/// Every family, on both paths.
fn every_target() -> impl Iterator<Item = Target> {
    let on_both = |config: TargetConfig| {
        [Kernels::Fast, Kernels::Portable]
            .map(|kernels| small_target(config.clone()).with_kernels(kernels))
    };
    family_configs().into_iter().flat_map(on_both)
}

fn random_ids(length: i64, seed: i64) -> Tensor {
    // The generator is process-wide: no other test may draw in between.
    let _alone = alone();
    tch::manual_seed(seed);
    Tensor::randint(50, [length], (Kind::Int64, Device::Cpu))
}

#[test]
fn cached_chunks_equal_the_whole() {
    for target in every_target() {
        let ids = random_ids(23, 1);
        let whole = target.forward_packed(&ids, &[0, 23], &[0, 2, 3]);
        for chunks in [vec![23], vec![1; 23], vec![10, 4, 1, 8], vec![3, 20]] {
            check_chunks(&target, &ids, &chunks, &whole);
        }
    }
}

fn check_chunks(target: &Target, ids: &Tensor, chunks: &[i64], whole: &[Tensor]) {
    let mut cache = target.new_cache(30);
    let mut start = 0;
    for &chunk in chunks {
        let output = target.forward_cached(&ids.narrow(0, start, chunk), &mut cache, &[0, 2]);
        let expected = |state: usize| whole[state].narrow(0, start, chunk);
        let what = format!("{:?} from {start}", target.config().family);
        assert_close(&output.aux_states[0], &expected(0), &what);
        assert_close(&output.aux_states[1], &expected(1), &what);
        assert_close(&output.hidden_td, &expected(2), &what);
        start += chunk;
    }
    assert_eq!((cache.len(), cache.capacity(), cache.is_empty()), (23, 30, false));
}

/// Up to 32 rows use packed layers, more libtorch's matmuls; each continues the other's work.
#[test]
fn few_rows_and_many_share_a_cache() {
    for target in every_target() {
        let ids = random_ids(90, 13);
        let whole = target.forward_packed(&ids, &[0, 90], &[0, 2, 3]);
        for chunks in [[40, 1, 9, 40], [7, 50, 32, 1], [33, 33, 20, 4]] {
            let mut cache = target.new_cache(90);
            let mut start = 0;
            for chunk in chunks {
                let ids = ids.narrow(0, start, chunk);
                let output = target.forward_cached(&ids, &mut cache, &[2, 0, 2]);
                let what = format!("{:?} from {start}", target.config().family);
                let expected = |state: usize| whole[state].narrow(0, start, chunk);
                assert_close(&output.aux_states[0], &expected(1), &what);
                assert_close(&output.aux_states[1], &expected(0), &what);
                assert_eq!(output.aux_states[2], output.aux_states[0], "{what}");
                assert_close(&output.hidden_td, &expected(2), &what);
                start += chunk;
            }
        }
    }
}

/// Verification runs a block in one call, plain decoding token by token: both give the same bits on
/// any number of threads, so near ties cannot make texts diverge.
#[test]
fn a_few_rows_have_the_bits_of_one_by_one_on_any_threads() {
    for (config, dtype) in family_configs().into_iter().zip([Kind::Float, Kind::BFloat16].repeat(3))
    {
        let dir = tempfile::tempdir().unwrap();
        small_target(config).save(dir.path(), Kind::Float).unwrap();
        let options = TargetOptions { device: Device::Cpu, dtype };
        let target = Target::load(dir.path(), &options).unwrap();
        let ids = random_ids(30, 14);
        let run = |chunks: &[i64], threads: i32| {
            // Applies to this thread only.
            tch::set_num_threads(threads);
            let mut cache = target.new_cache(30);
            let mut start = 0;
            let rows = chunks.iter().map(|&chunk| {
                let ids = ids.narrow(0, start, chunk);
                start += chunk;
                target.forward_cached(&ids, &mut cache, &[]).hidden_td
            });
            let hidden_td = Tensor::cat(&rows.collect::<Vec<_>>(), 0);
            (target.logits(&hidden_td), target.most_likely(&hidden_td))
        };
        let expected = run(&[1; 30], 1);
        assert_eq!(expected.0.kind(), dtype);
        for (chunks, threads) in [(&[1; 30][..], 2), (&[30], 2), (&[8, 3, 16, 3], 3), (&[9, 21], 5)]
        {
            assert_eq!(run(chunks, threads), expected, "{dtype:?}, {chunks:?}, {threads} threads");
        }
    }
}

/// Few rows of several sequences share a pass and have the same bits as alone; a long piece of a
/// prompt among them is processed separately.
#[test]
fn sequences_that_share_a_pass_have_the_bits_of_each_alone() {
    for (config, dtype) in family_configs().into_iter().zip([Kind::Float, Kind::BFloat16].repeat(3))
    {
        let dir = tempfile::tempdir().unwrap();
        small_target(config).save(dir.path(), Kind::Float).unwrap();
        let options = TargetOptions { device: Device::Cpu, dtype };
        let target = Target::load(dir.path(), &options).unwrap();
        let (held, new) = ([5i64, 1, 40, 3, 20, 9], [8i64, 1, 8, 35, 16, 8]);
        let ids = random_ids(held.iter().chain(&new).sum(), 15);
        let piece = |lengths: &[i64], at: usize, before: i64| {
            ids.narrow(0, before + lengths[..at].iter().sum::<i64>(), lengths[at])
        };
        let caches = || {
            let cache = |at: usize| {
                let mut cache = target.new_cache(80);
                target.forward_cached(&piece(&held, at, 0), &mut cache, &[]);
                cache
            };
            (0..held.len()).map(cache).collect::<Vec<_>>()
        };
        let behind = held.iter().sum::<i64>();
        let alone: Vec<_> = caches()
            .iter_mut()
            .enumerate()
            .map(|(at, cache)| target.forward_cached(&piece(&new, at, behind), cache, &[2, 0]))
            .collect();
        let mut together = caches();
        let mut parts: Vec<SequencePart<'_>> = together
            .iter_mut()
            .zip(new)
            .map(|(cache, tokens)| SequencePart { cache, tokens: tokens as usize })
            .collect();
        let all = ids.narrow(0, behind, new.iter().sum());
        let both = target.forward_sequences(&all, &mut parts, &[2, 0]);
        let mut start = 0;
        for (alone, tokens) in alone.iter().zip(new) {
            let own = |x: &Tensor| x.narrow(0, start, tokens);
            let float = |x: &Tensor| x.to_kind(Kind::Float);
            assert_eq!(own(&both.hidden_td), float(&alone.hidden_td), "{dtype:?} from {start}");
            for (both, alone) in both.aux_states.iter().zip(&alone.aux_states) {
                assert_eq!(own(both), float(alone), "{dtype:?} from {start}");
            }
            start += tokens;
        }
    }
}

#[test]
fn the_most_likely_token_is_the_first_of_the_largest_logits() {
    for tied in [true, false] {
        let config = TargetConfig { tie_word_embeddings: tied, ..small_config() };
        let target = small_target(config);
        let dir = tempfile::tempdir().unwrap();
        target.save(dir.path(), Kind::Float).unwrap();
        let portable = Target::load(dir.path(), &F32).unwrap().with_kernels(Kernels::Portable);
        for rows in [1, 5, 32, 40] {
            let _alone = alone();
            tch::manual_seed(rows);
            let state = Tensor::randn([rows, 32], (Kind::Float, Device::Cpu));
            let found = target.most_likely(&state);
            assert_eq!(found, portable.most_likely(&state), "{rows} rows");
            let normed = target.normed(&state);
            assert_eq!(found, target.most_likely_of_normed(&normed), "{rows} rows, normed");
            assert_close(&target.logits(&state), &portable.logits(&state), "logits");
        }
        // A zero state gives equal logits.
        let zeros = Tensor::zeros([2, 32], (Kind::Float, Device::Cpu));
        assert_eq!(Vec::<i64>::try_from(target.most_likely(&zeros)).unwrap(), [0, 0]);
    }
}

#[test]
fn aux_states_come_in_the_order_asked_and_layers_above_them_do_not_matter() {
    let target = small_target(small_config());
    let ids = random_ids(12, 7);
    let all = target.forward_packed(&ids, &[0, 12], &[0, 1, 2, 3]);
    for asked in [vec![1], vec![2, 0], vec![3, 1, 1], vec![0]] {
        let aux_states = target.forward_packed(&ids, &[0, 12], &asked);
        assert_eq!(aux_states.len(), asked.len());
        for (id, aux_state) in asked.iter().zip(aux_states) {
            assert_eq!(aux_state, all[*id as usize], "{asked:?}");
        }
    }
    assert_eq!(all[0], target.embed(&ids));
    assert!(target.forward_packed(&ids, &[0, 12], &[]).is_empty());
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
    every_target().for_each(check_packed);
}

fn check_packed(target: Target) {
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
        // A few logits of one state, computed from the file alone.
        let state = no_grad(|| loaded.forward_packed(&ids, &[0, 9], &[3])[0].get(8));
        let state = Vec::<f32>::try_from(state).unwrap();
        let facts = TargetFacts::load(dir.path(), None).unwrap();
        let few = TargetIo::logits_of(dir.path(), &facts, &state, false, &[7, 0, 49]).unwrap();
        let expected = run(&loaded).get(8).index_select(0, &Tensor::from_slice(&[7i64, 0, 49]));
        assert_close(&Tensor::from_slice(&few), &expected, "logits of a few tokens");
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
        // float32 losses near 4 carry a rounding error of 1e-6.
        let error = (moved - predicted).abs();
        assert!(error <= 0.05 * predicted + 4e-6, "{name}: {moved:e}, predicted {predicted:e}");
    }
}

#[test]
fn every_family_is_saved_with_the_tensors_it_loads() {
    for config in family_configs() {
        let target = small_target(config.clone());
        let dir = tempfile::tempdir().unwrap();
        target.save(dir.path(), Kind::Float).unwrap();
        let file = TensorFile::open(&dir.path().join("model.safetensors")).unwrap();
        let bias = "model.layers.1.self_attn.q_proj.bias".to_owned();
        assert_eq!(file.names().contains(&bias), config.dense().qkv_bias);
        let norm = "model.layers.0.self_attn.k_norm.weight".to_owned();
        assert_eq!(file.names().contains(&norm), config.dense().qk_norm);
        let loaded = Target::load(dir.path(), &F32).unwrap();
        let ids = random_ids(8, 3);
        let last = |target: &Target| target.forward_packed(&ids, &[0, 8], &[3]).remove(0);
        assert_eq!(last(&loaded), last(&target), "{:?}", config.family);
    }
}

#[test]
fn shards_load_as_one_file_and_a_missing_one_is_named() {
    let target = small_target(small_config());
    let (whole, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    target.save(whole.path(), Kind::BFloat16).unwrap();
    let file = TensorFile::open(&whole.path().join("model.safetensors")).unwrap();
    let mut weight_map = serde_json::Map::new();
    for shard in 0..2 {
        let name = format!("model-{shard}.safetensors");
        let mut names = file.names();
        names.sort();
        names.retain(|tensor| tensor.len() % 2 == shard);
        let tensors: Vec<_> = names
            .into_iter()
            .map(|tensor| (tensor.clone(), file.any_tensor(&tensor).unwrap()))
            .collect();
        weight_map.extend(tensors.iter().map(|(tensor, _)| (tensor.clone(), name.clone().into())));
        write_safetensors(&sharded.path().join(name), &tensors).unwrap();
    }
    let index = serde_json::json!({ "weight_map": weight_map }).to_string();
    std::fs::write(sharded.path().join("model.safetensors.index.json"), index).unwrap();
    std::fs::copy(whole.path().join("config.json"), sharded.path().join("config.json")).unwrap();
    let ids = random_ids(8, 3);
    let last = |dir: &Path| {
        let target = Target::load(dir, &F32).unwrap();
        target.forward_packed(&ids, &[0, 8], &[3]).remove(0)
    };
    assert_eq!(last(sharded.path()), last(whole.path()));
    std::fs::remove_file(sharded.path().join("model-1.safetensors")).unwrap();
    let error = Target::load(sharded.path(), &F32).unwrap_err().to_string();
    assert!(error.contains("lacks the shard model-1.safetensors"), "{error}");
}

#[test]
fn in_bf16_it_runs_to_bf16s_precision() {
    let dir = tempfile::tempdir().unwrap();
    small_target(small_config()).save(dir.path(), Kind::BFloat16).unwrap();
    let run = |dtype| {
        let options = TargetOptions { device: Device::Cpu, dtype };
        let target = Target::load(dir.path(), &options).unwrap();
        assert_eq!(target.dtype(), dtype);
        let ids = random_ids(14, 2);
        let mut cache = target.new_cache(14);
        target.forward_cached(&ids.narrow(0, 0, 9), &mut cache, &[]);
        let output = target.forward_cached(&ids.narrow(0, 9, 5), &mut cache, &[3]);
        target.logits(&output.aux_states[0]).to_kind(Kind::Float)
    };
    let error = relative_error(&run(Kind::BFloat16), &run(Kind::Float));
    // Eight bits of mantissa through three layers.
    assert!(error > 1e-6 && error < 0.1, "{error}");
}

#[test]
fn the_head_alone_is_the_targets() {
    for tied in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let config = TargetConfig { tie_word_embeddings: tied, ..small_config() };
        let target = small_target(config);
        target.save(dir.path(), Kind::Float).unwrap();
        let head = TargetIo::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
        let ids = random_ids(10, 2);
        assert_eq!(head.embed(&ids), target.embed(&ids));
        let hidden = target.forward_packed(&ids, &[0, 10], &[3]).remove(0);
        assert_close(&head.logits(&hidden), &target.logits(&hidden), "logits of the head");
        assert_close(&target.lm_head(&target.normed(&hidden)), &target.logits(&hidden), "lm_head");
        assert_eq!(head.lm_head_vh.data_ptr() == head.embedding_vh.data_ptr(), tied);
    }
}

#[test]
fn a_few_steps_of_training_learn_a_text() {
    let target = Target::random(small_config(), 2, Device::Cpu);
    let ids = random_ids(24, 5);
    let loss = || {
        let hidden = &target.forward_packed(&ids, &[0, 24], &[3])[0];
        target.logits(hidden).narrow(0, 0, 23).cross_entropy_for_logits(&ids.narrow(0, 1, 23))
    };
    let before = loss().double_value(&[]);
    for _ in 0..60 {
        loss().backward();
        no_grad(|| {
            for (_, mut parameter) in target.parameters() {
                let mut gradient = parameter.grad();
                let _ = parameter.g_sub_(&(gradient.sign() * 3e-3));
                let _ = gradient.zero_();
            }
        });
    }
    let after = loss().double_value(&[]);
    assert!(before > 3.0 && after < 0.3, "{before} to {after}");
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
    let mut deeper = small_config().with_dense(|dense| {
        dense.windows.pop();
    });
    deeper.num_hidden_layers = 2;
    Target::random(deeper, 1, Device::Cpu).save(dir.path(), Kind::Float).unwrap();
    target.save(&dir.path().join("other"), Kind::Float).unwrap();
    std::fs::copy(dir.path().join("other/config.json"), dir.path().join("config.json")).unwrap();
    assert!(message().contains("has no tensor model.layers.2."), "{}", message());
}
