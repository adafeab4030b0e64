//! A drafter's shape, as its own files state it.

use serde_json::Value;

use crate::gguf::Header;

/// Which software's files they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Layout {
    /// config.json and model.safetensors as z-lab lays them out.
    #[default]
    ZLab,
    /// The same files in the layout of speculators.
    Speculators,
    /// A GGUF file alone.
    Gguf,
}

/// What the files say; `None` where they do not.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Shape {
    pub(crate) layout: Layout,
    pub(crate) block_size: Option<u64>,
    pub(crate) layers: Option<u64>,
    pub(crate) hidden_size: Option<u64>,
    /// Layers of the target that are read; 0 is the embedding's output.
    pub(crate) target_layers: Vec<u64>,
    /// Layers that the target has.
    pub(crate) target_depth: Option<u64>,
    pub(crate) mask_token_id: Option<u64>,
    pub(crate) sliding_window: Option<u64>,
    pub(crate) parameters: Option<u64>,
    pub(crate) dtype: Option<String>,
}

impl Shape {
    /// The shape in a `config.json`.
    pub(crate) fn of_config(config: &Value) -> Self {
        let own = &config["dflash_config"];
        let inner = &config["transformer_layer_config"];
        let is_speculators = config["speculators_model_type"].is_string();
        let network = if is_speculators { inner } else { config };
        let number = |places: [&Value; 2]| places.into_iter().find_map(Value::as_u64);
        // Speculators counts as we do, z-lab from the first decoder layer's output.
        let (ids, add) = match is_speculators {
            true => (&config["aux_hidden_state_layer_ids"], 0),
            false => (&own["target_layer_ids"], 1),
        };
        let ids = ids.as_array().into_iter().flatten().filter_map(Value::as_i64);
        Self {
            layout: if is_speculators { Layout::Speculators } else { Layout::ZLab },
            block_size: number([&own["block_size"], &config["block_size"]]),
            layers: network["num_hidden_layers"].as_u64(),
            hidden_size: network["hidden_size"].as_u64(),
            target_layers: ids.filter_map(|id| u64::try_from(id + add).ok()).collect(),
            target_depth: config["num_target_layers"].as_u64(),
            mask_token_id: number([&own["mask_token_id"], &config["mask_token_id"]]),
            sliding_window: network["sliding_window"].as_u64(),
            parameters: None,
            dtype: None,
        }
    }

    /// Whether SGLang serves a draft of this shape: it gives out the states between the target's layers.
    pub(crate) fn suits_sglang(&self) -> bool {
        self.layout == Layout::ZLab
            && !self.target_layers.iter().any(|&id| id == 0 || Some(id) == self.target_depth)
    }

    /// The shape in the header of a GGUF file.
    pub(crate) fn of_gguf(header: &Header) -> Self {
        Self {
            layout: Layout::Gguf,
            block_size: header.number("block_size"),
            layers: header.number("block_count"),
            hidden_size: header.number("embedding_length"),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_layouts_tell_the_same_shape() {
        let ours = json!({"num_hidden_layers": 4, "hidden_size": 256, "block_size": 8,
            "sliding_window": null, "dflash_config":
            {"block_size": 8, "mask_token_id": 4095, "target_layer_ids": [-1, 1, 5]}});
        let shape = Shape::of_config(&ours);
        assert_eq!(
            (shape.block_size, shape.layers, shape.hidden_size),
            (Some(8), Some(4), Some(256))
        );
        assert_eq!((&shape.target_layers[..], shape.mask_token_id), (&[0, 2, 6][..], Some(4095)));
        let theirs = json!({"speculators_model_type": "dflash", "block_size": 8,
            "mask_token_id": 4095, "aux_hidden_state_layer_ids": [0, 2, 6],
            "transformer_layer_config": {"num_hidden_layers": 4, "hidden_size": 256}});
        let expected = Shape { layout: Layout::Speculators, ..shape };
        assert_eq!(Shape::of_config(&theirs), expected);
        assert_eq!(Shape::of_config(&json!({})), Shape::default());
        let between = |ids: [i64; 2]| {
            let config =
                json!({"num_target_layers": 8, "dflash_config": {"target_layer_ids": ids}});
            Shape::of_config(&config).suits_sglang()
        };
        assert!(between([0, 6]));
        assert!(!between([-1, 6]) && !between([0, 7]) && !Shape::of_config(&theirs).suits_sglang());
    }
}
