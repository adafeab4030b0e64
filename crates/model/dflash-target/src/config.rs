//! A target's configuration: the part of Hugging Face's `config.json` that affects its arithmetic.
//!
//! [`TargetConfig`] has what all targets share; layer settings belong to the family, in
//! [`super::families`].

use std::path::Path;

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use serde_json::{Value, json};
use tch::Tensor;

use super::families::{DenseConfig, DenseKind, Family};

/// A target's outer dimensions and family. Field names follow Hugging Face where it has one.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// The name under `architectures` in config.json.
    pub architecture: String,
    /// Settings of the layers.
    pub family: Family,
    /// Settings of embedding, final norm and lm_head.
    pub outer: Outer,
    pub hidden_size: i64,
    pub num_hidden_layers: usize,
    /// Rows of the embedding and of the lm_head.
    pub vocab_size: i64,
    pub rms_norm_eps: f64,
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: i64,
    /// Tokens that end an answer, from config.json and generation_config.json.
    pub eos_token_ids: Vec<i64>,
    pub pad_token_id: Option<i64>,
}

/// Special treatment of embedding, final norm and lm_head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outer {
    /// Factor on embedding rows, rounded to their type.
    pub embedding_scale: f64,
    /// Whether norms multiply by one plus their weight.
    pub norm_plus_one: bool,
    /// Soft cap c: a logit x becomes `c tanh(x / c)`.
    pub final_softcap: Option<f64>,
}

impl Outer {
    /// No special treatment.
    pub const PLAIN: Self =
        Self { embedding_scale: 1.0, norm_plus_one: false, final_softcap: None };

    /// Applies the soft cap, if there is one.
    pub(crate) fn capped(&self, logits: Tensor) -> Tensor {
        match self.final_softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }
}

impl TargetConfig {
    /// Reads `config.json` (and the end tokens of `generation_config.json`) of a model directory.
    ///
    /// # Errors
    /// No config.json, an unsupported architecture, a missing or unsupported key (named).
    pub fn load(dir: &Path) -> Result<Self> {
        let fields = Fields::read(dir, "config.json")?;
        let mut config = Self::from_fields(&fields)?;
        if dir.join("generation_config.json").is_file() {
            let more = Fields::read(dir, "generation_config.json")?.tokens("eos_token_id")?;
            config.eos_token_ids.extend(more);
        }
        config.eos_token_ids.sort_unstable();
        config.eos_token_ids.dedup();
        Ok(config)
    }

    /// A small dense Qwen3 of the given shape, for the demo to train from scratch.
    pub fn qwen3(hidden_size: i64, num_hidden_layers: usize, vocab_size: i64) -> Self {
        Self {
            architecture: DenseKind::Qwen3.architecture().into(),
            family: DenseConfig::small(hidden_size, num_hidden_layers).into(),
            outer: Outer::PLAIN,
            hidden_size,
            num_hidden_layers,
            vocab_size,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: true,
            max_position_embeddings: 2048,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
        }
    }

    /// The configuration of dense layers.
    ///
    /// # Panics
    /// If the family is not dense.
    pub fn dense(&self) -> &DenseConfig {
        self.family.dense().expect("dense layers")
    }

    /// Applies `change` to the configuration of dense layers.
    ///
    /// # Panics
    /// If the family is not dense.
    #[must_use]
    pub fn with_dense(mut self, change: impl FnOnce(&mut DenseConfig)) -> Self {
        let mut dense = self.dense().clone();
        change(&mut dense);
        self.architecture = dense.kind.architecture().into();
        self.family = dense.into();
        self
    }

    fn from_fields(file: &Fields) -> Result<Self> {
        // Multimodal models nest the text model's configuration.
        let nested = file.object("text_config")?;
        let text = nested.as_ref().unwrap_or(file);
        let (architecture, family, outer) = Family::read(file, text)?;
        let tied = if text.has("tie_word_embeddings") { text } else { file };
        let mut eos_token_ids = text.tokens("eos_token_id")?;
        eos_token_ids.extend(file.tokens("eos_token_id")?);
        Ok(Self {
            architecture,
            outer,
            hidden_size: text.required("hidden_size", Fields::size)?,
            num_hidden_layers: text.required("num_hidden_layers", Fields::size)? as usize,
            vocab_size: match (text.size("vocab_size")?, family.architecture().vocab_size()) {
                (None, None) => text.required("vocab_size", Fields::size)?,
                (written, default) => written.or(default).expect("one of them"),
            },
            rms_norm_eps: text.number("rms_norm_eps")?.unwrap_or(1e-6),
            tie_word_embeddings: tied
                .flag_or("tie_word_embeddings", family.architecture().is_tied())?,
            max_position_embeddings: text.size("max_position_embeddings")?.unwrap_or(32_768),
            eos_token_ids,
            pad_token_id: text.token("pad_token_id")?.or(file.token("pad_token_id")?),
            family,
        })
    }

    /// The configuration in Hugging Face's format, for a checkpoint stored in `dtype`. Layer keys
    /// are included only for families that we save.
    pub(crate) fn to_json(&self, dtype: &str) -> Value {
        let mut config = self.family.dense().map_or_else(|| json!({}), DenseConfig::to_json);
        let common = json!({
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "eos_token_id": ids_to_json(&self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
            "initializer_range": INITIALIZER_RANGE,
            "use_cache": true,
            "dtype": dtype,
        });
        if let (Value::Object(config), Value::Object(common)) = (&mut config, common) {
            config.extend(common);
        }
        config
    }
}

/// Standard deviation of fresh weights; Hugging Face's default for these families.
pub(crate) const INITIALIZER_RANGE: f64 = 0.02;

/// One id as a number, several as a list, none as null.
fn ids_to_json(ids: &[i64]) -> Value {
    match ids {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflash_tensor::rope::{Llama3Scaling, Scaling};

    fn load(config: &Value) -> Result<TargetConfig> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        TargetConfig::load(dir.path())
    }

    fn with(changes: Value) -> Value {
        let mut config = TargetConfig::qwen3(64, 4, 100).to_json("float32");
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    #[test]
    fn what_we_write_we_read() {
        let mut config = TargetConfig::qwen3(64, 4, 100);
        config.eos_token_ids = vec![7, 9];
        config.pad_token_id = Some(3);
        let config =
            config.with_dense(|dense| dense.windows = vec![None, Some(16), None, Some(16)]);
        assert_eq!(load(&config.to_json("bfloat16")).unwrap(), config);
        let config = config.with_dense(|dense| {
            dense.kind = DenseKind::Llama;
            dense.qk_norm = false;
            dense.windows = vec![None; 4];
            dense.rope.scaling = Scaling::Llama3(Llama3Scaling {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 64,
            });
        });
        assert_eq!(load(&config.to_json("bfloat16")).unwrap(), config);
    }

    #[test]
    fn rope_theta_is_found_in_either_place_and_head_dim_derived() {
        let old = with(json!({ "rope_parameters": null, "rope_theta": 5e5, "head_dim": null }));
        let dense = |config| load(&config).unwrap().family.dense().unwrap().clone();
        let found = dense(old);
        assert_eq!((found.rope.theta, found.head_dim), (5e5, 16));
        let new = with(json!({ "rope_theta": null, "rope_parameters": { "rope_theta": 1e6 } }));
        assert_eq!(dense(new).rope.theta, 1e6);
    }

    #[test]
    fn end_tokens_of_both_files_are_joined() {
        let dir = tempfile::tempdir().unwrap();
        let write = |file: &str, value: Value| {
            std::fs::write(dir.path().join(file), value.to_string()).unwrap();
        };
        write("config.json", with(json!({ "eos_token_id": 9 })));
        write("generation_config.json", json!({ "eos_token_id": [9, 4] }));
        assert_eq!(TargetConfig::load(dir.path()).unwrap().eos_token_ids, [4, 9]);
    }

    #[test]
    fn what_we_cannot_run_is_named() {
        let check = |changes: Value, expected: &str| {
            let message = load(&with(changes)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        };
        let mamba = json!({ "architectures": ["MambaForCausalLM"] });
        check(mamba.clone(), "MambaForCausalLM is not supported");
        check(mamba, "Qwen3ForCausalLM");
        let dynamic = json!({ "rope_parameters": { "rope_type": "dynamic", "rope_theta": 1e4 } });
        check(dynamic, "`rope_parameters.rope_type` is \"dynamic\"");
        let longrope = json!({ "rope_parameters": { "rope_type": "longrope", "factor": 4.0,
            "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8] } });
        check(longrope, "of its types default, linear, llama3 and yarn");
        check(json!({ "hidden_act": "gelu" }), "`hidden_act`");
        check(json!({ "num_key_value_heads": 3 }), "`num_key_value_heads` is 3");
        check(json!({ "hidden_size": null }), "`hidden_size`");
        check(json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor");
    }

    #[test]
    fn windows_follow_the_family() {
        let windows = |changes: Value| {
            let config = load(&with(changes)).unwrap();
            config.family.dense().unwrap().windows.clone()
        };
        let unused = json!({ "sliding_window": 8, "use_sliding_window": false });
        assert_eq!(windows(unused), [None; 4]);
        let late = json!({ "sliding_window": 8, "use_sliding_window": true, "layer_types": null,
                           "max_window_layers": 3 });
        assert_eq!(windows(late), [None, None, None, Some(8)]);
        let mistral = json!({ "architectures": ["MistralForCausalLM"], "sliding_window": 8,
                              "layer_types": null });
        assert_eq!(windows(mistral), [Some(8); 4]);
    }
}
