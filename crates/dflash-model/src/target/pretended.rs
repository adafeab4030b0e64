//! What a target and a draft ask of a GPU outside training, on a pretended one: attention by the kernels
//! that are called by name, and few launches.

use std::path::Path;

use dflash_torch_sys::trace::{Form, Record, pretend};
use tch::{Device, Kind, Tensor, no_grad};

use super::{SequencePart, Target, TargetConfig};
use crate::draft::{ContextPart, Draft, DraftConfig};
use crate::target::divided::Shard;
use crate::target::head::DEFAULT_PREFIX;
use crate::target::parameters::Init;

const GPU: Device = Device::Cuda(0);
const LAYERS: usize = 2;

/// Qwen3's layers, 64 wide, in bfloat16; the second one sliding.
fn target() -> Target {
    let config =
        TargetConfig::qwen3(64, LAYERS, 50).with_dense(|dense| dense.windows = vec![None, Some(5)]);
    built(config)
}

fn built(config: TargetConfig) -> Target {
    let (options, prefix, shard) = ((Kind::BFloat16, GPU), DEFAULT_PREFIX, Shard::WHOLE);
    let init = Init { weights: None, options, prefix, shard, packing: None };
    let target = Target::build(config, &init).unwrap();
    // As weights of a file are; fresh ones are to be trained.
    for (_, weight) in target.parameters() {
        let _ = weight.set_requires_grad(false);
    }
    target
}

fn draft() -> Draft {
    let config = r#"{
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 100.0, "vocab_size": 50, "max_position_embeddings": 64, "block_size": 4,
        "sliding_window": 6, "use_sliding_window": true,
        "layer_types": ["full_attention", "sliding_attention"],
        "dflash_config": {"mask_token_id": 8, "target_layer_ids": [0, 1]}
    }"#;
    let config = DraftConfig::parse(Path::new("config.json"), config).unwrap();
    let zeros = Draft::zeros(config.clone(), GPU);
    Draft::new(config, zeros.flat().to_kind(Kind::BFloat16))
}

fn ids(count: i64) -> Tensor {
    Tensor::ones([count], (Kind::Int64, GPU))
}

/// What `f` asks for after the preparations.
fn asked(f: impl FnOnce(&dyn Fn())) -> Record {
    let start_over = || dflash_torch_sys::trace::start_over();
    no_grad(|| pretend(|| f(&start_over))).unwrap().1
}

fn count(record: &Record, part: &str) -> usize {
    record.events.iter().filter(|event| event.operation.contains(part)).count()
}

fn launches(record: &Record) -> u64 {
    record.events.iter().map(|event| event.launches).sum()
}

fn flash_alone(record: &Record, calls: usize) {
    let operations: Vec<&str> = record.events.iter().map(|event| &*event.operation).collect();
    assert_eq!(count(record, "scaled_dot_product"), 0, "{operations:?}");
    assert_eq!(count(record, "_flash_attention_forward"), calls, "{operations:?}");
    assert!(record.events.iter().all(|event| event.form != Form::Wait), "{operations:?}");
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

#[test]
fn blocks_are_one_call_a_layer_and_a_context() {
    for contexts in [1, 3] {
        let record = asked(|begun| {
            let draft = draft();
            let mut caches: Vec<_> = (0..contexts).map(|_| draft.new_cache(40)).collect();
            let features = Tensor::zeros([contexts * 7, 128], (Kind::BFloat16, GPU));
            let mut parts: Vec<ContextPart<'_>> =
                caches.iter_mut().map(|cache| ContextPart { cache, rows: 7 }).collect();
            draft.extend_contexts(&features, &mut parts);
            let blocks = Tensor::zeros([contexts * 4, 64], (Kind::BFloat16, GPU));
            begun();
            let _ = draft.forward_blocks(&caches.iter().collect::<Vec<_>>(), &blocks);
        });
        flash_alone(&record, 2 * contexts as usize);
    }
}

/// A token of Qwen3-8B's 36 layers, which a GPU computes in about 4 ms: the host makes a launch in about 5 us.
/// A layer takes 13, of which 4 are the copies of the residual stream and of new keys and values.
#[test]
fn a_decoded_token_is_few_launches() {
    let of_layers = |layers: usize| {
        launches(&asked(|begun| {
            let config = TargetConfig::qwen3(64, layers, 50);
            let target = built(config);
            let mut cache = target.new_cache(40);
            target.forward_cached(&ids(20), &mut cache, &[]);
            begun();
            let hidden_td = target.forward_cached(&ids(1), &mut cache, &[]).hidden_td;
            let _ = target.most_likely(&hidden_td);
        }))
    };
    let (two, four) = (of_layers(2), of_layers(4));
    let whole = two + (four - two) / 2 * 34;
    assert!(whole <= 480, "{} a layer, {whole} in all", (four - two) / 2);
}
