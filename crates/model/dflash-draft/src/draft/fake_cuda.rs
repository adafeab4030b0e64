//! GPU work of a draft outside training, recorded on a fake GPU: attention uses the directly called
//! kernels, and launches are few.

use std::path::Path;

use dflash_kernels::kernels::Kernels;
use dflash_test_place::launches::{asked, count, flash_alone, launches, of_36};
use dflash_torch_sys::trace::Form;
use tch::{Device, Kind, Tensor};

use super::{ContextPart, Draft, DraftConfig};

const GPU: Device = Device::Cuda(0);

fn draft() -> Draft {
    draft_of(2)
}

/// Every other layer is sliding.
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

/// A draft's pass over its block, and extending its context by the accepted tokens.
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

/// If no kernel supports the window, the mask is built once per pass, on the GPU.
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
