//! Checks before an export: a draft that does not belong to the target, and drafts that an engine
//! would silently serve wrongly.

use dflash_draft::{LayerKind, unservable};
use dflash_identity::TargetIdentity;
use dflash_settings::{ExportFormat, ExportSettings};
use dflash_target::{TargetFacts, check_layer_ids};

use crate::source::Source;
use crate::{Error, Result};

const LLAMA_CPP: &str = "llama.cpp";
const VLLM: &str = "vLLM";

/// Targets whose hidden states llama.cpp passes to drafts, among those that this program runs (its
/// `src/models/*.cpp` that set `t_layer_inp`).
const LLAMA_CPP_TARGETS: [&str; 3] = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"];

/// Rejects a draft that cannot belong to the target.
pub(crate) fn fits(
    source: &Source,
    target: &TargetFacts,
    identity: &TargetIdentity,
    settings: &ExportSettings,
) -> Result<()> {
    let draft = source.config();
    let depth = draft.num_target_layers.unwrap_or(target.num_hidden_layers);
    let facts = [
        ("hidden_size", draft.hidden_size, target.hidden_size),
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("num_target_layers", depth as i64, target.num_hidden_layers as i64),
    ];
    if let Some((key, found, expected)) = facts.into_iter().find(|(_, a, b)| a != b) {
        let (found, expected) = (found.to_string(), expected.to_string());
        return Err(Error::Foreign { draft: source.path.clone(), key, found, expected });
    }
    check_layer_ids(&draft.target_layer_ids, target.num_hidden_layers)?;
    match &source.made_for {
        Some(made_for) if !made_for.is_same_as(identity) && !settings.allow_other_target => {
            Err(Error::OtherTarget {
                draft: source.path.clone(),
                made_for: made_for.to_string(),
                target: identity.to_string(),
            })
        }
        _ => Ok(()),
    }
}

/// Rejects what the format's engines would serve wrongly.
pub(crate) fn servable(
    source: &Source,
    target: &TargetFacts,
    settings: &ExportSettings,
) -> Result<()> {
    if let Some(reason) = unservable(source.config(), settings.format)? {
        return Err(Error::Unservable { engine: "an engine", reason });
    }
    match settings.format {
        ExportFormat::Zlab => zlab(source, settings.full_vocabulary),
        ExportFormat::Speculators => speculators(source),
        ExportFormat::Gguf => llama_cpp(source, target),
    }
}

fn zlab(source: &Source, full_vocabulary: bool) -> Result<()> {
    match &source.vocabulary {
        Some(vocabulary) if !full_vocabulary => {
            let (size, all) = (vocabulary.selected().len(), vocabulary.target_size());
            let reason = format!(
                "z-lab's layout cannot express that it was trained on {size} of {all} tokens, so it would draft from all of them; use --format speculators or gguf, or accept that \
                 with --full-vocabulary"
            );
            Err(Error::Unservable { engine: "an engine", reason })
        }
        _ => Ok(()),
    }
}

fn speculators(source: &Source) -> Result<()> {
    if is_mixed(source) {
        let reason = "it uses one causality for all layers in this layout, but sliding layers are causal in their block and full layers are not; use --format zlab";
        return Err(Error::Unservable { engine: VLLM, reason: reason.into() });
    }
    Ok(())
}

fn llama_cpp(source: &Source, target: &TargetFacts) -> Result<()> {
    let refuse = |reason: String| Err(Error::Unservable { engine: LLAMA_CPP, reason });
    if is_mixed(source) {
        return refuse(
            "it has one causality for all layers, but sliding layers are causal in their block and full layers are not; use --format zlab"
                .into(),
        );
    }
    let last = target.num_hidden_layers;
    if source.config().target_layer_ids.iter().any(|&id| id as usize == last) {
        return refuse(format!(
            "it returns inputs of layers only: layer id {last} is not available"
        ));
    }
    if source.config().attention_bias {
        return refuse(
            "its dflash has no biases, but the draft's attention has (attention_bias); use --format \
             zlab"
                .into(),
        );
    }
    if let Some(scaling) = &source.config().rope_scaling {
        return refuse(format!(
            "dflash writes no rotary scaling into GGUF, but the draft has {}; use --format zlab",
            scaling.name()
        ));
    }
    let architecture = &target.architecture;
    if !LLAMA_CPP_TARGETS.contains(&architecture.as_str()) {
        return refuse(format!(
            "it does not return hidden states of {architecture} targets, only of {}",
            LLAMA_CPP_TARGETS.join(", ")
        ));
    }
    Ok(())
}

fn is_mixed(source: &Source) -> bool {
    let slides = |layer: &LayerKind| *layer == LayerKind::Sliding;
    let layers = &source.config().layers;
    layers.iter().any(slides) && !layers.iter().all(slides)
}
