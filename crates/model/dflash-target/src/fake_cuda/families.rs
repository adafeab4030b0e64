//! Attention of every native family on a GPU uses the directly called kernels, except in the
//! families listed here with a reason.
//!
//! libtorch's own choice for the others is not visible here: on the fake GPU it is products and a
//! softmax, as ours is for soft-capped scores or sinks. So direct calls are counted.

use std::collections::BTreeSet;
use std::path::PathBuf;

use dflash_golden::entries;
use dflash_tensor::Error;
use dflash_test_place::launches::count;
use dflash_torch_sys::trace::{Record, on_readable_fake_cuda, start_over};
use serde_json::Value;
use tch::no_grad;

use super::{built, ids};
use crate::layer::Memory;
use crate::{Family, SequencePart, Target, TargetConfig};

/// Number of layers built: more than the length of any family's layer pattern.
const LAYERS: usize = 8;

/// Families that use the kernels in part or not at all, by the folder of a configuration.
const OTHERS: &[(&str, &str)] = &[
    ("gemma2", "scores are squeezed"),
    ("gpt_oss", "a sink takes weight from every query"),
    ("gpt_oss_mxfp4", "a sink takes weight from every query"),
    ("gpt-oss-120b", "a sink takes weight from every query"),
    ("llama4", "a chunk's keys are neither a window nor all"),
    ("llama4_dense_layers", "a chunk's keys are neither a window nor all"),
    ("deepseek_v3", "keys are wider than values"),
    ("deepseek_v3_fp8", "keys are wider than values"),
    ("deepseek_v3_plain", "keys are wider than values"),
    ("Kimi-K2.5", "keys are wider than values"),
    ("gemma4_one_size", "heads of full layers are 512 wide"),
    ("gemma-4-31B-it", "heads of full layers are 512 wide"),
];

/// Configurations of the test vectors and of released models, each cut to its first layers.
fn configs() -> Vec<(String, TargetConfig)> {
    let vectors = ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None));
    let vectors = vectors.filter(|entry| entry.own).map(|entry| entry.path);
    let released = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/configs"));
    let released = std::fs::read_dir(released).unwrap().map(|entry| entry.unwrap().path());
    let dirs = vectors.chain(released.filter(|path| path.is_dir()));
    let named = |dir: PathBuf| {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        (name, first_layers(&dir.join("config.json")))
    };
    dirs.map(named).collect()
}

/// The configuration in `file` with at most [`LAYERS`] layers.
fn first_layers(file: &std::path::Path) -> TargetConfig {
    let mut config: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let nested = config.get("text_config").is_some();
    let text = if nested { &mut config["text_config"] } else { &mut config };
    let all = text["num_hidden_layers"].as_u64().unwrap() as usize;
    let layers = all.min(LAYERS);
    for value in text.as_object_mut().unwrap().values_mut() {
        if let Value::Array(list) = value
            && list.len() == all
        {
            list.truncate(layers);
        }
    }
    text["num_hidden_layers"] = layers.into();
    widen_heads(text);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    TargetConfig::load(dir.path()).unwrap_or_else(|error: Error| panic!("{error}"))
}

/// Some vectors have heads of size 12, which no released model has; kernels need multiples of 8.
fn widen_heads(text: &mut Value) {
    let width =
        text["hidden_size"].as_u64().unwrap() / text["num_attention_heads"].as_u64().unwrap();
    if width != 12 || text["head_dim"].is_u64() {
        return;
    }
    text["head_dim"] = 16.into();
    for key in ["short_factor", "long_factor"] {
        if let Some(Value::Array(factors)) = text["rope_parameters"].get_mut(key) {
            factors.resize(16 / 2, 1.0.into());
        }
    }
}

/// A kind of pass: prepares, calls the second argument, and runs.
type PassOf = fn(&Target, &dyn Fn());

const PASSES: [(&str, usize, PassOf); 5] = [
    ("packed documents", 1, |target, begun| {
        begun();
        target.forward_packed(&ids(40), &[0, 12, 40], &last(target));
    }),
    ("a prompt", 1, |target, begun| cached(target, 0, 40, begun)),
    ("a cached token", 1, |target, begun| cached(target, 20, 1, begun)),
    ("a block", 1, |target, begun| cached(target, 20, 8, begun)),
    ("blocks of several sequences", 2, |target, begun| {
        let mut caches = [9, 30].map(|tokens| {
            let mut cache = target.new_cache(60);
            target.forward_cached(&ids(tokens), &mut cache, &[]);
            cache
        });
        begun();
        let mut parts: Vec<SequencePart<'_>> =
            caches.iter_mut().map(|cache| SequencePart { cache, tokens: 4 }).collect();
        target.forward_sequences(&ids(8), &mut parts, &[]);
    }),
];

fn last(target: &Target) -> [u32; 1] {
    [target.num_layers() as u32]
}

/// A pass of `tokens` after `before` cached tokens.
fn cached(target: &Target, before: i64, tokens: i64, begun: &dyn Fn()) {
    let mut cache = target.new_cache(60);
    if before > 0 {
        target.forward_cached(&ids(before), &mut cache, &[]);
    }
    begun();
    target.forward_cached(&ids(tokens), &mut cache, &[]);
}

/// The number of attention layers, and the GPU work of one pass. Experts' rows may be picked on the
/// host, by value.
fn asked(config: &TargetConfig, pass: PassOf) -> (usize, Record) {
    let run = || {
        let target = built(config.clone());
        pass(&target, &start_over);
        let layers = target.body.layers.iter();
        layers.filter(|layer| !matches!(layer.memory(), Memory::State)).count()
    };
    no_grad(|| on_readable_fake_cuda(run)).unwrap()
}

#[test]
fn every_family_but_those_listed_takes_the_kernels_by_name() {
    let (mut seen, mut listed) = (BTreeSet::new(), 0);
    for (name, config) in configs() {
        seen.insert(config.architecture.clone());
        let other = OTHERS.iter().find(|(other, _)| *other == name);
        let mut left = Vec::new();
        for (pass, sequences, run) in PASSES {
            let (attending, record) = asked(&config, run);
            let by_name = count(&record, "_flash_attention_forward");
            let all = attending * sequences;
            if by_name != all {
                left.push(format!("{pass}: {by_name} of {all} calls"));
            }
        }
        match other {
            None => assert!(left.is_empty(), "{name}: {left:?}"),
            Some((_, why)) => assert!(!left.is_empty(), "{name} is listed for nothing: {why}"),
        }
        listed += usize::from(other.is_some());
    }
    assert_eq!(listed, OTHERS.len(), "a listed name is not among the configurations");
    let nested = |name: &&str| !name.ends_with("ForConditionalGeneration");
    let all: BTreeSet<String> = Family::architectures().filter(nested).map(str::to_owned).collect();
    let missing: Vec<_> = all.difference(&seen).collect();
    assert!(missing.is_empty(), "no configuration of {missing:?}");
}
