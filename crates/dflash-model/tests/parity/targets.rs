//! Targets: every hidden state, logits, and decoding with a cache, against Hugging Face's.
//!
//! Which families run is the code's own list. One that it refuses must be named here, so that a
//! family which stops loading is a failure, and so is one that begins to load and stays named.

use std::collections::BTreeSet;
use std::path::Path;

use dflash_golden::{Entry, entries};
use dflash_model::checkpoint::TensorFile;
use dflash_model::target::{Family, Target, TargetConfig, TargetOptions};
use dflash_model::{Error, Kernels};
use libtest_mimic::Trial;
use tch::{Device, Kind, Tensor, no_grad};

use super::on_both_paths;
use super::vectors::assert_close;

/// Architectures with vectors that no code here runs.
const LEFT_OUT: [&str; 13] = [
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
];

const TOLERANCE: f64 = 1e-4;

pub(crate) fn trials() -> Vec<Trial> {
    let found: Vec<Entry> =
        ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None)).collect();
    let of_entry = |entry: &Entry| match refused(&entry.path) {
        Some(architecture) => vec![refusal(entry, architecture)],
        None => on_both_paths("targets", entry, check),
    };
    let mut trials: Vec<Trial> = found.iter().flat_map(of_entry).collect();
    trials.push(Trial::test("targets::every_family_has_vectors_or_is_named", move || {
        every_family_has_vectors_or_is_named(&found);
        Ok(())
    }));
    trials
}

/// The architecture, if the code does not run it.
fn refused(dir: &Path) -> Option<String> {
    match TargetConfig::load(dir) {
        Err(Error::Architecture { found, .. }) => Some(found),
        _ => None,
    }
}

fn refusal(entry: &Entry, architecture: String) -> Trial {
    let dir = entry.path.clone();
    let name = format!("targets::{} left out: {architecture} is refused by name", entry.name);
    Trial::test(name, move || {
        let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
        let message = Target::load(&dir, &options).unwrap_err().to_string();
        assert!(message.contains(&architecture), "{message}");
        Ok(())
    })
}

fn every_family_has_vectors_or_is_named(found: &[Entry]) {
    let (mut run, mut left_out) = (BTreeSet::new(), BTreeSet::new());
    for entry in found.iter().filter(|entry| entry.own) {
        match TargetConfig::load(&entry.path) {
            Ok(config) => run.insert(config.family.architecture().to_owned()),
            Err(Error::Architecture { found, .. }) => left_out.insert(found),
            Err(error) => panic!("{error}"),
        };
    }
    let claimed = Family::ALL.map(|family| family.architecture().to_owned());
    assert_eq!(run, BTreeSet::from(claimed), "families that run, and those the code claims");
    assert_eq!(left_out, BTreeSet::from(LEFT_OUT.map(String::from)), "families left out by name");
}

fn check(dir: &Path, kernels: Kernels) {
    let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
    let target = Target::load(dir, &options).unwrap().with_kernels(kernels);
    let golden = TensorFile::open(&dir.join("golden.safetensors")).unwrap();
    let [ids, states, logits] =
        ["input_ids", "hidden_states", "logits"].map(|name| golden.any_tensor(name).unwrap());
    let (ids, tokens) = (ids.flatten(0, -1), ids.numel() as i64);
    let all: Vec<u32> = (0..=target.num_layers() as u32).collect();
    assert_eq!(states.size()[0], all.len() as i64, "a state for each layer id");
    no_grad(|| {
        let captures = target.forward_packed(&ids, &[0, tokens], &all);
        for (id, capture) in captures.iter().enumerate() {
            assert_close(&format!("state {id}"), capture, &states.get(id as i64), TOLERANCE);
        }
        let found = target.logits(captures.last().unwrap());
        assert_close("logits", &found, &logits, TOLERANCE);
        let decoded = decode(&target, &ids, tokens * 4 / 5);
        let rows = decoded.size()[0];
        let expected = logits.narrow(0, tokens - rows, rows);
        assert_close("decoded logits", &decoded, &expected, TOLERANCE);
    });
}

/// Logits of the tokens from `prefill` on, fed one by one behind a cache of those before.
fn decode(target: &Target, ids: &Tensor, prefill: i64) -> Tensor {
    let tokens = ids.size()[0];
    let mut cache = target.new_cache(tokens as usize);
    target.forward_cached(&ids.narrow(0, 0, prefill), &mut cache, &[]);
    let step = |at: i64, cache: &mut _| {
        let output = target.forward_cached(&ids.narrow(0, at, 1), cache, &[]);
        target.logits(&output.hidden_td)
    };
    let rows: Vec<Tensor> = (prefill..tokens).map(|at| step(at, &mut cache)).collect();
    Tensor::cat(&rows, 0)
}
