//! What a target is: the part of Hugging Face's `config.json` that decides its arithmetic.
//!
//! A family is a set of choices (biases, norms, windows, RoPE scaling) in [`TargetConfig`]; the
//! layers read those choices and never ask for the family's name. Adding a dense family means one
//! arm in [`Family`] and, where it needs it, one more choice here.

use std::path::Path;

use serde_json::{Value, json};

use crate::fields::Fields;
use crate::{Error, Result};

/// The families we run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2, 3.x.
    Llama,
    /// Mistral 7B and its kin.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The name under `architectures` in config.json.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    fn find(fields: &Fields) -> Result<Self> {
        let architectures = fields.texts("architectures")?.unwrap_or_default();
        let model_type = fields.text("model_type")?;
        let named = |family: &Self| {
            architectures.first().map_or_else(
                || model_type.as_deref() == Some(family.model_type()),
                |architecture| architecture == family.architecture(),
            )
        };
        Self::ALL.into_iter().find(named).ok_or_else(|| Error::Architecture {
            path: fields.path().into(),
            found: architectures.first().cloned().or(model_type).unwrap_or("(none)".into()),
            supported: Self::ALL.map(Self::architecture).join(", "),
        })
    }
}

/// How rotary frequencies depend on the index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Llama 3's stretch of the low frequencies, if any.
    pub llama3: Option<Llama3Scaling>,
}

/// Parameters of the `llama3` RoPE type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Stretch of the lowest frequencies.
    pub factor: f64,
    /// Frequencies of fewer turns than this over the original context are stretched in full.
    pub low_freq_factor: f64,
    /// Frequencies of more turns than this are left alone.
    pub high_freq_factor: f64,
    /// The context length the model was first trained with.
    pub original_max_position_embeddings: i64,
}

/// A target's dimensions and choices. Field names are Hugging Face's where they have one.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// The family, which names the architecture when the target is saved.
    pub family: Family,
    pub hidden_size: i64,
    pub intermediate_size: i64,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i64,
    pub num_key_value_heads: i64,
    pub head_dim: i64,
    /// Rows of the embedding and of the lm_head.
    pub vocab_size: i64,
    pub rms_norm_eps: f64,
    pub rope: RopeConfig,
    pub tie_word_embeddings: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether o has a bias.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised per head before the rotation.
    pub qk_norm: bool,
    /// Per layer: how many tokens it sees (itself included), or `None` for all.
    pub windows: Vec<Option<i64>>,
    pub max_position_embeddings: i64,
    /// Tokens that end an answer, from config.json and generation_config.json.
    pub eos_token_ids: Vec<i64>,
    pub pad_token_id: Option<i64>,
}

impl TargetConfig {
    /// Reads `config.json` (and the end tokens of `generation_config.json`) of a model directory.
    ///
    /// # Errors
    /// No config.json, an architecture outside [`Family`], a key that is missing or that we cannot
    /// honour (each named).
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

    /// A small dense Qwen3 of the given shape: what the demo trains from scratch.
    pub fn qwen3(hidden_size: i64, num_hidden_layers: usize, vocab_size: i64) -> Self {
        Self {
            family: Family::Qwen3,
            hidden_size,
            intermediate_size: hidden_size * 3,
            num_hidden_layers,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: hidden_size / 4,
            vocab_size,
            rms_norm_eps: 1e-6,
            rope: RopeConfig { theta: 10_000.0, llama3: None },
            tie_word_embeddings: true,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: true,
            windows: vec![None; num_hidden_layers],
            max_position_embeddings: 2048,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
        }
    }

    fn from_fields(fields: &Fields) -> Result<Self> {
        let family = Family::find(fields)?;
        let hidden_size = fields.required("hidden_size", Fields::size)?;
        let heads = fields.required("num_attention_heads", Fields::size)?;
        let num_hidden_layers = fields.required("num_hidden_layers", Fields::size)? as usize;
        let attention_bias = fields.flag("attention_bias")?;
        let config = Self {
            family,
            hidden_size,
            intermediate_size: fields.required("intermediate_size", Fields::size)?,
            num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: fields.size("num_key_value_heads")?.unwrap_or(heads),
            head_dim: fields.size("head_dim")?.unwrap_or(hidden_size / heads),
            vocab_size: fields.required("vocab_size", Fields::size)?,
            rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope: rope_config(fields)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?,
            // Qwen2 has these biases always and its config no key for them.
            qkv_bias: family == Family::Qwen2 || attention_bias,
            output_bias: family != Family::Qwen2 && attention_bias,
            mlp_bias: fields.flag("mlp_bias")?,
            qk_norm: family == Family::Qwen3,
            windows: windows(fields, family, num_hidden_layers)?,
            max_position_embeddings: fields.size("max_position_embeddings")?.unwrap_or(32_768),
            eos_token_ids: fields.tokens("eos_token_id")?,
            pad_token_id: fields.token("pad_token_id")?,
        };
        config.check(fields)?;
        Ok(config)
    }

    fn check(&self, fields: &Fields) -> Result<()> {
        let activation = fields.text("hidden_act")?.unwrap_or("silu".into());
        if activation != "silu" {
            return Err(fields.refuse("hidden_act", "only silu is supported"));
        }
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            return Err(fields.refuse("num_key_value_heads", "it must divide num_attention_heads"));
        }
        if self.head_dim % 2 != 0 {
            return Err(fields.refuse("head_dim", "rotary embedding needs an even number"));
        }
        Ok(())
    }

    /// Width of all query heads together.
    pub fn query_size(&self) -> i64 {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads together; that of the value heads is the same.
    pub fn key_size(&self) -> i64 {
        self.num_key_value_heads * self.head_dim
    }

    /// The configuration as Hugging Face writes it, for a checkpoint stored in `dtype`.
    pub(crate) fn to_json(&self, dtype: &str) -> Value {
        let sliding = self.windows.iter().flatten().next();
        let layer_type = |window: &Option<i64>| match window {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.model_type(),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_json(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.output_bias,
            "attention_dropout": 0.0,
            "mlp_bias": self.mlp_bias,
            "hidden_act": "silu",
            "layer_types": self.windows.iter().map(layer_type).collect::<Vec<_>>(),
            "sliding_window": sliding,
            "use_sliding_window": sliding.is_some(),
            "max_window_layers": self.num_hidden_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "eos_token_id": ids_to_json(&self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
            "initializer_range": INITIALIZER_RANGE,
            "use_cache": true,
            "dtype": dtype,
        })
    }
}

/// Standard deviation of fresh weights, Hugging Face's default for these families.
pub(crate) const INITIALIZER_RANGE: f64 = 0.02;

/// One id as a number, several as a list, none as null.
fn ids_to_json(ids: &[i64]) -> Value {
    match ids {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    }
}

impl RopeConfig {
    fn to_json(self) -> Value {
        match self.llama3 {
            None => json!({ "rope_type": "default", "rope_theta": self.theta }),
            Some(scaling) => json!({
                "rope_type": "llama3",
                "rope_theta": self.theta,
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }),
        }
    }
}

/// RoPE from `rope_parameters` (new configs) or `rope_theta` with `rope_scaling` (old ones).
fn rope_config(fields: &Fields) -> Result<RopeConfig> {
    let parameters = fields.object("rope_parameters")?.or(fields.object("rope_scaling")?);
    let inner = |key| parameters.as_ref().map_or(Ok(None), |fields| fields.number(key));
    let theta = inner("rope_theta")?.or(fields.number("rope_theta")?).unwrap_or(10_000.0);
    let partial = inner("partial_rotary_factor")?.or(fields.number("partial_rotary_factor")?);
    if partial.is_some_and(|factor| factor != 1.0) {
        return Err(fields.refuse("partial_rotary_factor", "only 1.0 is supported"));
    }
    let llama3 = parameters.map_or(Ok(None), |parameters| rope_scaling(&parameters))?;
    Ok(RopeConfig { theta, llama3 })
}

fn rope_scaling(parameters: &Fields) -> Result<Option<Llama3Scaling>> {
    // Configs before 2024 call the key `type`.
    let key = if parameters.has("rope_type") { "rope_type" } else { "type" };
    let required = |key| parameters.required(key, Fields::number);
    match parameters.text(key)?.as_deref() {
        None | Some("default") => Ok(None),
        Some("llama3") => Ok(Some(Llama3Scaling {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_max_position_embeddings: parameters
                .required("original_max_position_embeddings", Fields::size)?,
        })),
        Some(_) => Err(parameters.refuse(key, "only default and llama3 are supported")),
    }
}

/// The window of every layer, by the rules of Hugging Face's models.
fn windows(fields: &Fields, family: Family, layers: usize) -> Result<Vec<Option<i64>>> {
    let window = match family {
        Family::Llama => None,
        // Mistral's class fills in its first release's window when the key is not written.
        Family::Mistral if !fields.has("sliding_window") => Some(4096),
        Family::Mistral => fields.size("sliding_window")?,
        Family::Qwen2 | Family::Qwen3 => {
            let used = fields.flag("use_sliding_window")?;
            fields.size("sliding_window")?.filter(|_| used)
        }
    };
    let Some(window) = window else { return Ok(vec![None; layers]) };
    match fields.texts("layer_types")? {
        Some(types) if types.len() != layers => {
            Err(fields.refuse("layer_types", "one entry per layer is needed"))
        }
        Some(types) => Ok(types
            .iter()
            .map(|layer_type| (layer_type == "sliding_attention").then_some(window))
            .collect()),
        None => {
            let full = match family {
                Family::Mistral => 0,
                _ => fields.size("max_window_layers")?.unwrap_or(28) as usize,
            };
            Ok((0..layers).map(|layer| (layer >= full).then_some(window)).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        config.windows = vec![None, Some(16), None, Some(16)];
        assert_eq!(load(&config.to_json("bfloat16")).unwrap(), config);
        config.family = Family::Llama;
        config.qk_norm = false;
        config.windows = vec![None; 4];
        config.rope.llama3 = Some(Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        });
        assert_eq!(load(&config.to_json("bfloat16")).unwrap(), config);
    }

    #[test]
    fn rope_theta_is_found_in_either_place_and_head_dim_derived() {
        let old = with(json!({ "rope_parameters": null, "rope_theta": 5e5, "head_dim": null }));
        let config = load(&old).unwrap();
        assert_eq!((config.rope.theta, config.head_dim), (5e5, 16));
        let new = with(json!({ "rope_theta": null, "rope_parameters": { "rope_theta": 1e6 } }));
        assert_eq!(load(&new).unwrap().rope.theta, 1e6);
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
        let yarn = json!({ "rope_parameters": { "rope_type": "yarn", "rope_theta": 1e4 } });
        check(yarn, "`rope_parameters.rope_type` is \"yarn\"");
        check(json!({ "hidden_act": "gelu" }), "`hidden_act`");
        check(json!({ "num_key_value_heads": 3 }), "`num_key_value_heads` is 3");
        check(json!({ "hidden_size": null }), "`hidden_size`");
        check(json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor");
    }

    #[test]
    fn windows_follow_the_family() {
        let windows = |changes: Value| load(&with(changes)).unwrap().windows;
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
