//! GPU work of a target outside training, recorded on a fake GPU: attention uses the directly
//! called kernels, and launches are few.

mod families;

use dflash_tensor::DeviceKind;
use dflash_tensor::weights::DEFAULT_PREFIX;
use dflash_test_place::launches::{asked, count, flash_alone, launches, of_36};
use tch::{Device, Kind, Tensor};

use crate::parallel::Shard;
use crate::parameters::Init;
use crate::{SequencePart, Target, TargetConfig};

const GPU: Device = Device::Cuda(0);
const LAYERS: usize = 2;

/// Qwen3 layers of width 64 in bfloat16; the second uses a sliding window.
fn target() -> Target {
    let config =
        TargetConfig::qwen3(64, LAYERS, 50).with_dense(|dense| dense.windows = vec![None, Some(5)]);
    built(config)
}

fn built(config: TargetConfig) -> Target {
    let place = DeviceKind { device: GPU, kind: Kind::BFloat16 };
    let (prefix, shard) = (DEFAULT_PREFIX, Shard::WHOLE);
    let init = Init { weights: None, place, prefix, shard, packing: None };
    let target = Target::build(config, &init).unwrap();
    // As weights loaded from a file; fresh ones require gradients.
    for (_, weight) in target.parameters() {
        let _ = weight.set_requires_grad(false);
    }
    target
}

fn ids(count: i64) -> Tensor {
    Tensor::ones([count], (Kind::Int64, GPU))
}

#[test]
fn documents_are_one_call_a_layer() {
    let record = asked(|begun| {
        let target = target();
        begun();
        target.forward_packed(&ids(30), &[0, 12, 12, 30], &[1, 2]);
    });
    flash_alone(&record, LAYERS);
}

#[test]
fn a_sequence_is_one_call_a_layer_however_many_tokens_it_gets() {
    for tokens in [1, 4] {
        let record = asked(|begun| {
            let target = target();
            let mut cache = target.new_cache(40);
            target.forward_cached(&ids(20), &mut cache, &[]);
            begun();
            target.forward_cached(&ids(tokens), &mut cache, &[1]);
        });
        flash_alone(&record, LAYERS);
    }
}

#[test]
fn each_of_several_sequences_is_one_call_a_layer() {
    let record = asked(|begun| {
        let target = target();
        let mut caches = [9, 20].map(|tokens| {
            let mut cache = target.new_cache(40);
            target.forward_cached(&ids(tokens), &mut cache, &[]);
            cache
        });
        begun();
        let mut parts: Vec<SequencePart<'_>> =
            caches.iter_mut().map(|cache| SequencePart { cache, tokens: 4 }).collect();
        target.forward_sequences(&ids(8), &mut parts, &[]);
    });
    flash_alone(&record, 2 * LAYERS);
}

/// A GPU computes a token of Qwen3-8B in about 4 ms, and the host needs about 5 us per launch. A
/// layer takes 10 launches: two norms, four products, heads written to the cache, attention,
/// SwiGLU, and a copy of the residual stream, which is still the layer's input.
#[test]
fn a_decoded_token_and_a_verified_block_are_few_launches() {
    type Config = fn(usize) -> TargetConfig;
    let kinds: [(&str, Config); 2] = [
        ("Qwen3", |layers| TargetConfig::qwen3(64, layers, 50)),
        // As in Llama, where heads are rotated but not normed.
        ("plain heads", |layers| {
            TargetConfig::qwen3(64, layers, 50).with_dense(|dense| dense.qk_norm = false)
        }),
    ];
    for ((name, config), tokens) in kinds.iter().flat_map(|kind| [(kind, 1), (kind, 8)]) {
        let (layer, whole) = of_36(|layers| {
            launches(&asked(|begun| {
                let target = built(config(layers));
                let mut cache = target.new_cache(40);
                target.forward_cached(&ids(20), &mut cache, &[]);
                begun();
                let hidden_td = target.forward_cached(&ids(tokens), &mut cache, &[1]).hidden_td;
                let _ = target.most_likely(&hidden_td);
            }))
        });
        eprintln!("{name}, {tokens} tokens: {layer} launches a layer, {whole} in all");
        assert!(
            layer <= 10 && whole <= 400,
            "{name}: {layer} a layer, {whole} for {tokens} tokens"
        );
    }
}

/// For a single prompt and for documents, whose keys are not cached.
#[test]
fn heads_are_one_launch_a_layer_in_a_prompt_too() {
    let record = asked(|begun| {
        let target = target();
        begun();
        target.forward_packed(&ids(30), &[0, 12, 30], &[2]);
        let mut cache = target.new_cache(40);
        target.forward_cached(&ids(20), &mut cache, &[]);
    });
    assert_eq!(count(&record, "heads"), 2 * LAYERS);
}
