//! speculators' form of a draft's `config.json`.
//!
//! It nests the Qwen3 fields in `transformer_layer_config`, counts captured layers as we do
//! (0 = embedding output) and does not say how many layers the target has.

use super::{Form, LayerKind, layer_ids};
use crate::Result;
use crate::fields::Fields;

/// The key that marks the form.
const KIND: &str = "speculators_model_type";

pub(super) fn is_form_of(config: &Fields) -> bool {
    config.has(KIND)
}

/// Reads the form.
///
/// # Errors
/// Another kind of drafter, a missing key, a draft whose blocks we do not decode.
pub(super) fn form(config: &Fields) -> Result<Form> {
    if config.text(KIND)?.is_none_or(|kind| kind != "dflash") {
        return Err(config.refuse(KIND, "only dflash drafters can be read"));
    }
    if config.flag("sample_from_anchor")? {
        let expected = "only drafts whose first slot is the clean anchor can be read";
        return Err(config.refuse("sample_from_anchor", expected));
    }
    let layers = config.required("transformer_layer_config", Fields::object)?;
    let types = layers.texts("layer_types")?.unwrap_or_default();
    let slides = types.iter().any(|name| name == LayerKind::Sliding.name());
    if slides && config.flag("sliding_window_non_causal")? {
        let expected = "sliding layers are read, trained and served causal in their block";
        return Err(config.refuse("sliding_window_non_causal", expected));
    }
    Ok(Form {
        layers,
        block_size: config.required("block_size", Fields::size)?,
        mask_token_id: config.required("mask_token_id", Fields::token)?,
        target_layer_ids: layer_ids(config, "aux_hidden_state_layer_ids", 0)?,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::super::DraftConfig;
    use super::*;

    /// A configuration as speculators 0.9 writes it, shortened to what is read.
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
