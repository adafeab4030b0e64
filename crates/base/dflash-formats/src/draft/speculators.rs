//! speculators' form of a draft's `config.json`.
//!
//! It nests the Qwen3 fields in `transformer_layer_config`, counts auxiliary layers as we do (0 =
//! embedding output) and does not record the number of target layers.

use serde_json::{Value, json};

use super::{DraftConfig, Form, LayerKind};
use crate::Result;
use crate::fields::Fields;

/// The key that identifies the form.
pub(super) const KIND: &str = "speculators_model_type";

/// The key of the Qwen3 fields.
pub(super) const LAYERS: &str = "transformer_layer_config";

/// The release that defines this form.
const VERSION: &str = "0.9.0";

/// Parts of z-lab's form that have a separate place in this one.
const OWN_PLACE: [&str; 3] = ["architectures", "block_size", "dflash_config"];

/// The target as recorded in this form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verifier {
    /// A directory, or a repository on the Hub.
    pub name_or_path: String,
    /// As in the target's config.json.
    pub architectures: Vec<String>,
}

/// Writes the form, for weights of type `dtype`.
///
/// vLLM takes one causality for all layers from `sliding_window_non_causal`: true if all of the
/// draft's layers are full, false if all are sliding.
pub(super) fn to_json(
    config: &DraftConfig,
    dtype: &str,
    draft_vocab_size: usize,
    verifier: &Verifier,
) -> Value {
    let mut layers = config.to_json(dtype);
    let fields = layers.as_object_mut().expect("a configuration is an object");
    fields.retain(|key, value| !OWN_PLACE.contains(&key.as_str()) && !value.is_null());
    json!({
        KIND: "dflash",
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": config.target_layer_ids,
        "block_size": config.block_size,
        "draft_vocab_size": draft_vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": false,
        "sliding_window_non_causal": !config.layers.contains(&LayerKind::Sliding),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": config.block().proposals(),
                "verifier_accept_k": 1,
            }],
            "verifier": {
                "architectures": verifier.architectures,
                "name_or_path": verifier.name_or_path,
            },
        },
        "speculators_version": VERSION,
        "tie_word_embeddings": false,
        LAYERS: layers,
    })
}

/// Rejects drafts of another type, and those whose blocks we cannot decode.
pub(super) fn check(form: &Form) -> Result<()> {
    let config = &form.own;
    if config.text(KIND)?.is_none_or(|kind| kind != "dflash") {
        return Err(config.refuse(KIND, "only dflash drafters can be read"));
    }
    if config.flag("sample_from_anchor")? {
        let expected = "only drafts whose first slot is the clean anchor can be read";
        return Err(config.refuse("sample_from_anchor", expected));
    }
    config.required(LAYERS, Fields::object)?;
    let types = form.layers.texts("layer_types")?.unwrap_or_default();
    let slides = types.iter().any(|name| name == LayerKind::Sliding.name());
    if slides && config.flag("sliding_window_non_causal")? {
        let expected = "sliding layers are read, trained and served causal in their block";
        return Err(config.refuse("sliding_window_non_causal", expected));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A configuration as written by speculators 0.9, reduced to the fields that are read.
    fn config() -> Value {
        json!({
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": [2, 3, 5, 6],
            "block_size": 8,
            "mask_token_id": 95,
            "draft_vocab_size": 96,
            "sample_from_anchor": false,
            "sliding_window_non_causal": false,
            "transformer_layer_config": {
                "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "head_dim": 8,
                "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
                "layer_types": ["full_attention", "full_attention"], "sliding_window": null,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        })
    }

    fn parse(change: impl FnOnce(&mut Value)) -> Result<DraftConfig> {
        let mut value = config();
        change(&mut value);
        DraftConfig::parse(Path::new("config.json"), &value.to_string())
    }

    #[test]
    fn layer_ids_are_ours_already() {
        let draft = parse(|_| ()).unwrap();
        assert_eq!(draft.target_layer_ids, [2, 3, 5, 6]);
        assert_eq!((draft.block_size, draft.mask_token_id), (8, 95));
        assert_eq!((draft.layers.len(), draft.num_target_layers), (2, None));
    }

    #[test]
    fn what_is_written_reads_back() {
        let draft = parse(|_| ()).unwrap();
        let verifier = Verifier { name_or_path: "t".into(), architectures: vec!["A".into()] };
        for (kinds, non_causal) in [(LayerKind::Full, true), (LayerKind::Sliding, false)] {
            let mut draft = draft.clone();
            draft.layers = vec![kinds; 2];
            draft.sliding_window = (kinds == LayerKind::Sliding).then_some(16);
            draft.num_target_layers = Some(8);
            let value = to_json(&draft, "float16", 50, &verifier);
            assert_eq!(value["sliding_window_non_causal"], json!(non_causal));
            assert_eq!(value["draft_vocab_size"], json!(50));
            assert_eq!(value["transformer_layer_config"]["dtype"], json!("float16"));
            let path = Path::new("config.json");
            assert_eq!(DraftConfig::parse(path, &value.to_string()).unwrap(), draft);
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_named() {
        let check = |change: fn(&mut Value), expect: &str| {
            let message = parse(change).unwrap_err().to_string();
            assert!(message.contains(expect), "{message}");
        };
        check(|c| c["speculators_model_type"] = json!("eagle3"), "eagle3");
        check(|c| c["sample_from_anchor"] = json!(true), "sample_from_anchor");
        check(|c| c["mask_token_id"] = Value::Null, "mask_token_id");
        check(|c| c["aux_hidden_state_layer_ids"] = json!("all"), "is \"all\"");
        let sliding = |c: &mut Value| {
            c["sliding_window_non_causal"] = json!(true);
            let layers = &mut c["transformer_layer_config"];
            layers["layer_types"] = json!(["full_attention", "sliding_attention"]);
            layers["sliding_window"] = json!(16);
        };
        check(sliding, "sliding_window_non_causal");
    }
}
