//! speculators' form of a draft's `config.json`, turned into z-lab's before it is read.
//!
//! It nests the Qwen3 fields in `transformer_layer_config`, counts captured layers as we do
//! (0 = embedding output) and does not say how many layers the target has.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// The key that marks the form, and the only kind of drafter that we run.
const KIND: &str = "speculators_model_type";
const DFLASH: &str = "dflash";

/// Whether `config` is in speculators' form.
pub(super) fn is_form_of(config: &Value) -> bool {
    config.get(KIND).is_some()
}

/// The same draft in z-lab's form.
///
/// # Errors
/// Another kind of drafter, a missing key, a draft whose blocks we do not decode.
pub(super) fn to_zlab(path: &Path, config: Value) -> Result<Value> {
    let error = |key: &str, found: String, expected: &str| Error::Config {
        path: path.into(),
        key: key.into(),
        found,
        expected: expected.into(),
    };
    let get = |key: &str| {
        let value = config.get(key).filter(|value| !value.is_null());
        value.ok_or_else(|| error(key, "missing".into(), "a dflash drafter needs it"))
    };
    if config[KIND] != DFLASH {
        return Err(error(KIND, config[KIND].to_string(), "only dflash drafters can be read"));
    }
    if config["sample_from_anchor"] == true {
        let expected = "only drafts whose first slot is the clean anchor can be read";
        return Err(error("sample_from_anchor", "true".into(), expected));
    }
    let mut zlab: Map<String, Value> = get("transformer_layer_config")?
        .as_object()
        .cloned()
        .ok_or_else(|| error("transformer_layer_config", "no object".into(), "one is expected"))?;
    zlab.insert("block_size".into(), get("block_size")?.clone());
    let ids = get("aux_hidden_state_layer_ids")?;
    let ours: Vec<i64> = serde_json::from_value(ids.clone())
        .map_err(|source| Error::Json { path: path.into(), source })?;
    let zlab_ids: Vec<i64> = ours.iter().map(|id| id - 1).collect();
    zlab.insert(
        "dflash_config".into(),
        json!({"mask_token_id": get("mask_token_id")?, "target_layer_ids": zlab_ids}),
    );
    let slides = zlab
        .get("layer_types")
        .and_then(Value::as_array)
        .is_some_and(|layers| layers.iter().any(|layer| layer == super::LayerKind::Sliding.name()));
    if slides && config["sliding_window_non_causal"] == true {
        let expected = "sliding layers are read, trained and served causal in their block";
        return Err(error("sliding_window_non_causal", "true".into(), expected));
    }
    Ok(Value::Object(zlab))
}

#[cfg(test)]
mod tests {
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
        check(|c| c["aux_hidden_state_layer_ids"] = json!("all"), "invalid type");
        let sliding = |c: &mut Value| {
            c["sliding_window_non_causal"] = json!(true);
            let layers = &mut c["transformer_layer_config"];
            layers["layer_types"] = json!(["full_attention", "sliding_attention"]);
            layers["sliding_window"] = json!(16);
        };
        check(sliding, "sliding_window_non_causal");
    }
}
