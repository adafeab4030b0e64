//! The draft's configuration, written as z-lab's `config.json` and read from it or from
//! speculators' form ([`speculators`]).
//!
//! One file has to be safe for every engine that serves drafts, so each Qwen3 field is explicit
//! and the block size stands at both places where engines look for it.

mod speculators;

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Error, Result};

/// How a draft layer looks at the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// The whole context, the whole block.
    Full,
    /// The last `sliding_window` tokens, causal in the block.
    Sliding,
}

impl LayerKind {
    fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// Everything that shapes a draft. Field names are Hugging Face's.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    /// H.
    pub hidden_size: i64,
    /// Width of the SwiGLU.
    pub intermediate_size: i64,
    /// Query heads.
    pub num_attention_heads: i64,
    /// Key/value heads.
    pub num_key_value_heads: i64,
    /// D.
    pub head_dim: i64,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// One entry a layer.
    pub layers: Vec<LayerKind>,
    /// Window of the sliding layers, if there are any.
    pub sliding_window: Option<usize>,
    /// Slots of a block, the anchor's included.
    pub block_size: usize,
    /// The token that stands in the slots to be predicted.
    pub mask_token_id: i64,
    /// Captured layers, 0 = embedding output, k = after k decoder layers; ascending.
    pub target_layer_ids: Vec<u32>,
    /// Layers of the target, where the checkpoint says so (speculators' does not).
    pub num_target_layers: Option<usize>,
    /// Rows of the target's embedding (padded, not `len(tokenizer)`).
    pub vocab_size: i64,
    /// As the target's.
    pub max_position_embeddings: i64,
    /// Standard deviation of a fresh matrix.
    pub initializer_range: f64,
    /// As the target's, where it names one.
    pub eos_token_id: Option<Value>,
}

impl DraftConfig {
    /// Query heads that share a key/value head.
    pub fn queries_per_kv(&self) -> i64 {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Width of all keys (or values) of a position.
    pub fn kv_width(&self) -> i64 {
        self.num_key_value_heads * self.head_dim
    }

    /// K.
    pub fn captures(&self) -> i64 {
        self.target_layer_ids.len() as i64
    }

    /// Reads `config.json` of a checkpoint directory.
    ///
    /// # Errors
    /// A missing file, a missing key, a rotary scaling or a layer type that we do not run.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        if !path.is_file() {
            return Err(Error::MissingFile { dir: dir.into(), file: "config.json".into() });
        }
        let text = std::fs::read_to_string(&path)
            .map_err(|source| Error::Read { path: path.clone(), source })?;
        Self::parse(&path, &text)
    }

    /// Parses the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let json = |source| Error::Json { path: path.into(), source };
        let mut value: Value = serde_json::from_str(text).map_err(json)?;
        if speculators::is_form_of(&value) {
            value = speculators::to_zlab(path, value)?;
        }
        let stored: Stored = serde_json::from_value(value).map_err(json)?;
        stored.resolve(path)
    }

    /// Writes `config.json` into `dir`.
    ///
    /// # Errors
    /// I/O.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(&self.to_json()).expect("a JSON value prints");
        text.push('\n');
        Ok(dflash_files::write_bytes(&dir.join("config.json"), text.as_bytes())?)
    }

    /// z-lab's form, safe for vLLM, SGLang and Transformers.
    fn to_json(&self) -> Value {
        let layer_types: Vec<&str> = self.layers.iter().map(|layer| layer.name()).collect();
        // z-lab counts layer outputs from 0; ours counts residual streams, 0 = the embedding.
        let zlab_ids: Vec<i64> =
            self.target_layer_ids.iter().map(|&id| i64::from(id) - 1).collect();
        json!({
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": false,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": zlab_ids,
            },
            "dtype": "bfloat16",
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "layer_types": layer_types,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.layers.len(),
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.layers.len(),
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": null,
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
            "use_cache": true,
            "use_sliding_window": self.sliding_window.is_some(),
            "vocab_size": self.vocab_size,
        })
    }
}

/// The keys we read; others are left to the engines.
#[derive(Debug, Deserialize)]
struct Stored {
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    num_key_value_heads: i64,
    head_dim: i64,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_parameters: Option<StoredRope>,
    rope_scaling: Option<Value>,
    layer_types: Option<Vec<String>>,
    sliding_window: Option<usize>,
    block_size: Option<usize>,
    dflash_config: StoredDflash,
    num_target_layers: Option<usize>,
    vocab_size: i64,
    max_position_embeddings: i64,
    #[serde(default = "default_initializer_range")]
    initializer_range: f64,
    eos_token_id: Option<Value>,
    attention_bias: Option<bool>,
    hidden_act: Option<String>,
}

#[derive(Debug, Deserialize)]
struct StoredRope {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

#[derive(Debug, Deserialize)]
struct StoredDflash {
    mask_token_id: i64,
    target_layer_ids: Vec<i64>,
    block_size: Option<usize>,
    /// JetSpec's mask, DFlash2's candidate selector: other drafters under DFlash's key.
    causal: Option<bool>,
    selector_rank: Option<u64>,
}

/// Hugging Face's default for the Qwen family.
fn default_initializer_range() -> f64 {
    0.02
}

impl Stored {
    fn resolve(self, path: &Path) -> Result<DraftConfig> {
        let config_error = |key: &str, found: String, expected: &str| Error::Config {
            path: path.into(),
            key: key.into(),
            found,
            expected: expected.into(),
        };
        let rope_theta = self.rope_theta(&config_error)?;
        let layers = self.layer_kinds(&config_error)?;
        let block_size = self.block_size.or(self.dflash_config.block_size).ok_or_else(|| {
            config_error("block_size", "missing".into(), "a draft needs the size of its blocks")
        })?;
        let ids = &self.dflash_config.target_layer_ids;
        let target_layer_ids = ids
            .iter()
            .map(|&id| u32::try_from(id + 1).ok())
            .collect::<Option<Vec<u32>>>()
            .filter(|ids| !ids.is_empty() && ids.is_sorted_by(|a, b| a < b))
            .ok_or_else(|| {
                let expected = "ascending layer numbers from -1 (embedding output) are expected";
                config_error("dflash_config.target_layer_ids", format!("{ids:?}"), expected)
            })?;
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if kv_heads <= 0 || heads % kv_heads != 0 {
            let expected = "it must divide num_attention_heads";
            return Err(config_error("num_key_value_heads", kv_heads.to_string(), expected));
        }
        if self.attention_bias == Some(true) {
            let expected = "drafts have projections without a bias";
            return Err(config_error("attention_bias", "true".into(), expected));
        }
        if let Some(other) = self.hidden_act.filter(|name| name != "silu") {
            return Err(config_error("hidden_act", other, "drafts have silu"));
        }
        let other_drafter = "only plain DFlash drafters can be read";
        if self.dflash_config.causal == Some(true) {
            return Err(config_error("dflash_config.causal", "true".into(), other_drafter));
        }
        if let Some(rank) = self.dflash_config.selector_rank {
            let key = "dflash_config.selector_rank";
            return Err(config_error(key, rank.to_string(), other_drafter));
        }
        let sliding = layers.contains(&LayerKind::Sliding);
        Ok(DraftConfig {
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: self.head_dim,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta,
            layers,
            sliding_window: self.sliding_window.filter(|_| sliding),
            block_size,
            mask_token_id: self.dflash_config.mask_token_id,
            target_layer_ids,
            num_target_layers: self.num_target_layers,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            initializer_range: self.initializer_range,
            eos_token_id: self.eos_token_id,
        })
    }

    fn rope_theta(&self, error: &impl Fn(&str, String, &str) -> Error) -> Result<f64> {
        let rope = self.rope_parameters.as_ref();
        let kind = rope.and_then(|rope| rope.rope_type.as_deref()).unwrap_or("default");
        let plain = "only plain rotary embedding is implemented for drafts";
        if kind != "default" {
            return Err(error("rope_parameters.rope_type", kind.into(), plain));
        }
        if let Some(scaling) = self.rope_scaling.as_ref().filter(|value| !value.is_null()) {
            return Err(error("rope_scaling", scaling.to_string(), plain));
        }
        rope.and_then(|rope| rope.rope_theta)
            .or(self.rope_theta)
            .ok_or_else(|| error("rope_theta", "missing".into(), "the rotary base is needed"))
    }

    fn layer_kinds(&self, error: &impl Fn(&str, String, &str) -> Error) -> Result<Vec<LayerKind>> {
        let Some(names) = &self.layer_types else {
            return Ok(vec![LayerKind::Full; self.num_hidden_layers]);
        };
        if names.len() != self.num_hidden_layers {
            let found = format!("{} entries", names.len());
            return Err(error("layer_types", found, "num_hidden_layers entries are expected"));
        }
        let kinds = names
            .iter()
            .map(|name| match name.as_str() {
                "full_attention" => Ok(LayerKind::Full),
                "sliding_attention" => Ok(LayerKind::Sliding),
                _ => Err(error(
                    "layer_types",
                    name.clone(),
                    "full_attention and sliding_attention are implemented",
                )),
            })
            .collect::<Result<Vec<_>>>()?;
        if kinds.contains(&LayerKind::Sliding) && self.sliding_window.is_none_or(|w| w == 0) {
            return Err(error("sliding_window", "missing".into(), "sliding layers need a window"));
        }
        Ok(kinds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DraftConfig {
        DraftConfig {
            hidden_size: 32,
            intermediate_size: 64,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 8,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            layers: vec![LayerKind::Full, LayerKind::Sliding],
            sliding_window: Some(128),
            block_size: 4,
            mask_token_id: 95,
            target_layer_ids: vec![2, 6, 10],
            num_target_layers: Some(12),
            vocab_size: 96,
            max_position_embeddings: 256,
            initializer_range: 0.02,
            eos_token_id: None,
        }
    }

    fn parse(change: impl FnOnce(&mut Value)) -> Result<DraftConfig> {
        let mut value = config().to_json();
        change(&mut value);
        DraftConfig::parse(Path::new("config.json"), &value.to_string())
    }

    #[test]
    fn what_is_written_reads_back() {
        assert_eq!(parse(|_| ()).unwrap(), config());
    }

    #[test]
    fn layer_ids_on_disk_are_zlabs() {
        let value = config().to_json();
        assert_eq!(value["dflash_config"]["target_layer_ids"], json!([1, 5, 9]));
    }

    #[test]
    fn what_cannot_be_honoured_is_named() {
        let check = |key: &str, value: Value, expect: &str| {
            let message = parse(|config| config[key] = value).unwrap_err().to_string();
            assert!(message.contains(expect), "{message}");
        };
        check("attention_bias", json!(true), "without a bias");
        check("hidden_act", json!("gelu"), "`hidden_act` is gelu");
        check("rope_scaling", json!({"rope_type": "yarn"}), "rope_scaling");
        check("layer_types", json!(["full_attention"]), "1 entries");
        check("layer_types", json!(["full_attention", "linear"]), "linear");
        check("sliding_window", json!(null), "sliding layers need a window");
        check("num_key_value_heads", json!(3), "must divide");
        check("hidden_size", json!("wide"), "invalid type");
        for (key, value) in [("causal", json!(true)), ("selector_rank", json!(16))] {
            let change = |config: &mut Value| config["dflash_config"][key] = value;
            let message = parse(change).unwrap_err().to_string();
            assert!(message.contains(&format!("dflash_config.{key}")), "{message}");
        }
    }
}
