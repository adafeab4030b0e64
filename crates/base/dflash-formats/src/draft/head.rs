//! A draft's head in its `config.json`.
//!
//! DFlash's own head needs no entry. For another head the file has its type and that type's keys:
//! an object under `head`, next to the block size. The draft's architecture is then also named
//! after the type, so that an engine that does not support it rejects the draft instead of serving
//! it without the head.

use serde_json::{Map, Value, json};

use super::BlockShape;
use crate::Result;
use crate::fields::Fields;

/// DFlash's head: the target's LM head, unchanged.
pub(super) const PLAIN: &str = "dflash";

/// Key of another head in `dflash_config`.
pub(super) const KEY: &str = "head";

/// A head as stored: its type, and that type's keys.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadFields {
    /// Name of its type.
    pub kind: String,
    /// Whether the anchor's row also predicts a token.
    pub sample_from_anchor: bool,
    /// Keys of the type.
    pub keys: Map<String, Value>,
}

impl Default for HeadFields {
    fn default() -> Self {
        Self { kind: PLAIN.to_owned(), sample_from_anchor: false, keys: Map::new() }
    }
}

impl HeadFields {
    /// Whether this is DFlash's own head, which engines support.
    pub fn is_plain(&self) -> bool {
        self.kind == PLAIN
    }

    /// Shape of a block with `rows` rows.
    pub(super) fn block(&self, rows: usize) -> BlockShape {
        BlockShape { rows, first_predicting: usize::from(!self.sample_from_anchor) }
    }

    /// Reads the head from `dflash`, the drafter-specific part of a configuration.
    pub(super) fn read(dflash: &Fields) -> Result<Self> {
        let Some(fields) = dflash.object(KEY)? else { return Ok(Self::default()) };
        let kind = fields.required("kind", Fields::text)?;
        let sample_from_anchor = fields.flag("sample_from_anchor")?;
        let mut keys = fields.into_map();
        keys.retain(|key, _| !["kind", "sample_from_anchor"].contains(&key.as_str()));
        Ok(Self { kind, sample_from_anchor, keys })
    }

    /// Adds the entry that [`Self::read`] reads to the configuration `config` in z-lab's form.
    pub(super) fn write(&self, config: &mut Value) {
        if *self == Self::default() {
            return;
        }
        let mut head = self.keys.clone();
        head.insert("kind".into(), json!(self.kind));
        head.insert("sample_from_anchor".into(), json!(self.sample_from_anchor));
        config["dflash_config"][KEY] = head.into();
        config["architectures"] = json!([format!("DFlashDraftModelWith_{}", self.kind)]);
    }
}
