//! Basic facts of any drafter's files, including drafters that we do not run.

use crate::fields::Fields;
use crate::gguf::{GgufFile, Value};

use super::{ARCHITECTURE, BlockShape, Form, HeadFields, Layout};

/// Facts in the files; `None` if absent or in an unknown form.
#[allow(missing_docs, reason = "as in `DraftConfig`")]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outline {
    pub layout: Layout,
    pub block_size: Option<i64>,
    /// Number of draft layers.
    pub layers: Option<i64>,
    pub hidden_size: Option<i64>,
    /// As in [`DraftConfig`](super::DraftConfig); empty if unknown.
    pub target_layer_ids: Vec<u32>,
    pub num_target_layers: Option<i64>,
    pub mask_token_id: Option<i64>,
    pub sliding_window: Option<i64>,
    /// Its type is [`Outline::UNREADABLE`] if the files describe it in an unknown form.
    pub head: HeadFields,
}

impl Outline {
    /// The type of a head that is described in an unknown form.
    pub const UNREADABLE: &str = "not readable";

    /// Shape of a block, if the number of rows is known and some predict.
    pub fn block(&self) -> Option<BlockShape> {
        let rows = usize::try_from(self.block_size?).ok().filter(|&rows| rows > 0)?;
        Some(self.head.block(rows)).filter(|block| block.proposals() > 0)
    }

    /// From a `config.json`.
    pub fn of_config(config: &Fields) -> Self {
        let form = Form::of(config.clone());
        let size = |key| form.layers.size(key).ok().flatten();
        Self {
            layout: form.layout,
            block_size: form.block_size().ok(),
            layers: size("num_hidden_layers"),
            hidden_size: size("hidden_size"),
            target_layer_ids: form.target_layer_ids().unwrap_or_default(),
            num_target_layers: size("num_target_layers"),
            mask_token_id: form.mask_token_id().ok(),
            sliding_window: size("sliding_window"),
            head: form.head().unwrap_or_else(|_| HeadFields {
                kind: Self::UNREADABLE.to_owned(),
                ..HeadFields::default()
            }),
        }
    }

    /// From a GGUF file.
    pub fn of_gguf(file: &GgufFile) -> Self {
        let size = |key: &str| match file.value(&format!("{ARCHITECTURE}.{key}")) {
            Some(Value::Integer(size)) => Some(*size),
            _ => None,
        };
        Self {
            layout: Layout::Gguf,
            block_size: size("block_size"),
            layers: size("block_count"),
            hidden_size: size("embedding_length"),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn outline(config: &Value) -> Outline {
        Outline::of_config(&Fields::of(Path::new("config.json"), config))
    }

    #[test]
    fn both_layouts_tell_the_same_shape() {
        let ours = json!({"num_hidden_layers": 4, "hidden_size": 256, "block_size": 8,
            "sliding_window": null, "dflash_config":
            {"block_size": 8, "mask_token_id": 4095, "target_layer_ids": [-1, 1, 5]}});
        let expected = Outline {
            block_size: Some(8),
            layers: Some(4),
            hidden_size: Some(256),
            target_layer_ids: vec![0, 2, 6],
            mask_token_id: Some(4095),
            ..Outline::default()
        };
        assert_eq!(outline(&ours), expected);
        let theirs = json!({"speculators_model_type": "dflash", "block_size": 8,
            "mask_token_id": 4095, "aux_hidden_state_layer_ids": [0, 2, 6],
            "transformer_layer_config": {"num_hidden_layers": 4, "hidden_size": 256}});
        let expected = Outline { layout: Layout::Speculators, ..expected };
        assert_eq!(outline(&theirs), expected);
        assert_eq!(outline(&json!({})), Outline::default());
        assert_eq!(outline(&json!([])), Outline::default());
        let causal = json!({"block_size": 4, "dflash_config": {"causal": true}});
        assert_eq!(outline(&causal).block_size, Some(4));
    }

    #[test]
    fn a_head_decides_how_many_tokens_a_block_proposes() {
        let check = |head: Value, kind: &str, proposals: Option<usize>| {
            let config = json!({"block_size": 4, "dflash_config": {"head": head}});
            let outline = outline(&config);
            let found = outline.block().map(|block| block.proposals());
            assert_eq!((outline.head.kind.as_str(), found), (kind, proposals), "{config}");
        };
        check(Value::Null, "dflash", Some(3));
        check(json!({"kind": "markov", "markov_rank": 8}), "markov", Some(3));
        check(json!({"kind": "other", "sample_from_anchor": true}), "other", Some(4));
        check(json!({}), Outline::UNREADABLE, Some(3));
        check(json!("markov"), Outline::UNREADABLE, Some(3));
        let block = |block_size: i64| outline(&json!({"block_size": block_size})).block();
        assert_eq!([block(0), block(1)], [None, None]);
    }
}
