//! What a draft's `config.json` says of its head.
//!
//! DFlash's own head needs no words. Of another the file names the kind, and the keys that this kind
//! reads: an object under `head`, beside the block size. The draft's architecture is then named after the
//! kind too, so that an engine that does not know it refuses the draft instead of serving half of it.

use serde_json::{Map, Value, json};

use super::BlockShape;
use crate::Result;
use crate::fields::Fields;

/// DFlash's head: the target's LM head, unchanged.
pub(super) const PLAIN: &str = "dflash";

/// Where `dflash_config` describes another head.
pub(super) const KEY: &str = "head";

/// A head as it is written: which kind it is, and that kind's own keys.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadFields {
    /// The name of its kind.
    pub kind: String,
    /// Whether the anchor's row predicts a token too.
    pub sample_from_anchor: bool,
    /// What else the kind needs to know.
    pub keys: Map<String, Value>,
}

impl Default for HeadFields {
    fn default() -> Self {
        Self { kind: PLAIN.to_owned(), sample_from_anchor: false, keys: Map::new() }
    }
}

impl HeadFields {
    /// Whether this is DFlash's own head, which engines serve.
    pub fn is_plain(&self) -> bool {
        self.kind == PLAIN
    }

    /// How a block of `rows` is used.
    pub(super) fn block(&self, rows: usize) -> BlockShape {
        BlockShape { rows, first_predicting: usize::from(!self.sample_from_anchor) }
    }

    /// The head that `dflash`, the drafter's own part of a configuration, describes.
    pub(super) fn read(dflash: &Fields) -> Result<Self> {
        let Some(fields) = dflash.object(KEY)? else { return Ok(Self::default()) };
        let kind = fields.required("kind", Fields::text)?;
        let sample_from_anchor = fields.flag("sample_from_anchor")?;
        let mut keys = fields.into_map();
        keys.retain(|key, _| !["kind", "sample_from_anchor"].contains(&key.as_str()));
        Ok(Self { kind, sample_from_anchor, keys })
    }

    /// Adds what [`Self::read`] finds to the configuration `config` of z-lab's form.
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
