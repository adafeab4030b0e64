//! What a target and a draft ask of a GPU outside training, on a pretended one: attention by the kernels
//! that are called by name, and few launches.

use std::path::Path;

use dflash_torch_sys::kernels::Kernels;
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
    draft_of(2)
}

/// Every other layer sliding.
fn draft_of(layers: usize) -> Draft {
    let kinds = ["full_attention", "sliding_attention"];
    let kinds: Vec<&str> = kinds.into_iter().cycle().take(layers).collect();
    let config = r#"{
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 100.0, "vocab_size": 50, "max_position_embeddings": 64, "block_size": 4,
        "sliding_window": 6, "use_sliding_window": true,
        "layer_types": KINDS,
        "dflash_config": {"mask_token_id": 8, "target_layer_ids": [0, 1]}
    }"#;
    let config = config.replace("LAYERS", &layers.to_string());
    let config = config.replace("KINDS", &serde_json::to_string(&kinds).unwrap());
    let config = DraftConfig::parse(Path::new("config.json"), &config).unwrap();
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

/// Of 36 layers, as Qwen3-8B has, that are like the third and fourth of `of_layers`.
fn of_36(of_layers: impl Fn(usize) -> u64) -> (u64, u64) {
    let (two, four) = (of_layers(2), of_layers(4));
    let layer = (four - two) / 2;
    (layer, two + layer * 34)
}

/// A token of Qwen3-8B, which a GPU computes in about 4 ms: the host makes a launch in about 5 us. A layer takes
/// 10: two norms, four products, heads on their way into the cache, attention, SwiGLU, and the copy of the
/// residual stream that is still the layer's input.
#[test]
fn a_decoded_token_and_a_verified_block_are_few_launches() {
    type Config = fn(usize) -> TargetConfig;
    let kinds: [(&str, Config); 2] = [
        ("Qwen3", |layers| TargetConfig::qwen3(64, layers, 50)),
        // As Llama: heads are turned and not normed.
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

/// Of a prompt alone and of documents, whose keys no cache keeps.
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

/// A draft's pass over its block, and the accepted tokens' way into its context.
#[test]
fn a_drafted_block_is_few_launches() {
    let record = |layers: usize| {
        asked(|begun| {
            let draft = draft_of(layers);
            let mut cache = draft.new_cache(40);
            let features = Tensor::zeros([7, 128], (Kind::BFloat16, GPU));
            draft.extend_context(&mut cache, &features, 0);
            begun();
            draft.extend_context(&mut cache, &features.narrow(0, 0, 3), 7);
            let block = Tensor::zeros([4, 64], (Kind::BFloat16, GPU));
            let _ = draft.forward_block(&cache, &block, 10);
        })
    };
    // One more for the context's keys and values.
    let (layer, whole) = of_36(|layers| launches(&record(layers)));
    assert!(layer <= 11, "{layer} a layer, {whole} in all");
    let of_five = launches(&record(5));
    eprintln!(
        "a drafted block and its context: {layer} launches a layer, {of_five} of five layers"
    );
    assert!(of_five <= 400 / 36 * 5 + 12, "{of_five} launches of five layers");
}

/// Where no kernel takes the window, the mask is made once a pass, and on the GPU.
#[test]
fn a_sliding_drafts_mask_is_made_once_and_not_on_the_host() {
    let of_layers = |layers: usize| {
        asked(|begun| {
            let draft = draft_of(layers).with_kernels(Kernels::Portable);
            let cache = draft.new_cache(40);
            let block = Tensor::zeros([4, 64], (Kind::BFloat16, GPU));
            begun();
            let _ = draft.forward_block(&cache, &block, 0);
        })
    };
    for layers in [2, 6] {
        let record = of_layers(layers);
        let uploads = record.events.iter().filter(|event| event.form == Form::BlockingUpload);
        assert_eq!(uploads.count(), 0);
        assert_eq!(count(&record, "masked_fill"), 1, "{layers} layers");
    }
}
