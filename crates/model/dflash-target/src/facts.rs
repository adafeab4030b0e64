//! What draft training needs to know about a target of any family: sizes, constants of the final
//! norm and logits, tensor names of embedding and output projection, and the basis of draft
//! defaults.
//!
//! Read from config.json alone, flat or nested. Together with the few files that hold those tensors
//! ([`super::head`]) this suffices for training, so many more families can be trained for than can
//! be run here. [`super::TargetConfig`] in contrast configures the layers of targets that this
//! program runs.

mod architectures;
mod draft_shape;
mod spec;

use std::path::Path;

use dflash_formats::fields::Fields;
use dflash_tensor::{Error, Result};
use serde::Serialize;

pub use self::draft_shape::{DraftAttentionShape, DraftDefaults};
pub use self::spec::TargetSpec;

pub(crate) use self::architectures::{HeadFacts, NamedHead};

use self::architectures::{EmbeddingScale, LogitScale};

/// The norm before the output projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// RMS norm times w.
    Rms,
    /// RMS norm times 1 + w: Gemma 2 and 3, Qwen3-Next, Qwen3.5.
    RmsPlusOne,
    /// Layer norm times w, plus an optional bias.
    Layer,
    /// Layer norm times 1 + w, plus an optional bias: Nemotron.
    LayerPlusOne,
}

/// Constants of a target's head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadNumbers {
    /// The final norm.
    pub norm: NormKind,
    /// Its epsilon.
    pub norm_eps: f64,
    /// Factor on the embedding.
    pub embedding_scale: f64,
    /// Whether that factor is rounded to the type of the stored weights, as in Gemma.
    pub rounds_embedding_scale: bool,
    /// Factor on logits.
    pub logit_scale: f64,
    /// Soft cap of logits.
    pub softcap: Option<f64>,
}

/// Tensor names of a head as far as they are known without the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NamedTensors {
    pub(crate) embedding: Option<String>,
    pub(crate) norm: Option<String>,
    pub(crate) norm_bias: Option<String>,
    pub(crate) head: Option<String>,
}

/// Whether the output projection is the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tying {
    /// Tied according to config.json or the family's default.
    Tied,
    /// Tied if the checkpoint has no output projection.
    ByAbsence,
}

/// What draft training needs to know about a target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetFacts {
    /// The architecture as config.json names it.
    pub architecture: String,
    /// Width H of the residual stream.
    pub hidden_size: i64,
    /// Number of decoder layers; also the layer id of the last hidden state.
    pub num_hidden_layers: usize,
    /// Rows of embedding and output projection, including unused ones.
    pub vocab_size: i64,
    /// Maximum context length.
    pub max_position_embeddings: i64,
    /// Tokens that end an answer, from config.json and generation_config.json.
    pub eos_token_ids: Vec<i64>,
    /// The padding token.
    pub pad_token_id: Option<i64>,
    /// Norm, scales and soft cap.
    pub head: HeadNumbers,
    /// If set, why the target's logits cannot be computed from the last state that servers deliver.
    pub no_last_state: Option<&'static str>,
    /// The checkpoint's quantization method, if config.json names one.
    pub quantization: Option<String>,
    /// Defaults that a draft takes from the target's attention, MLP and rotary embedding.
    pub(crate) draft: DraftDefaults,
    pub(crate) tensors: NamedTensors,
    pub(crate) tying: Tying,
}

impl TargetFacts {
    /// Reads `config.json` (and the end tokens of `generation_config.json`) of a model directory;
    /// values in `spec` take precedence.
    ///
    /// # Errors
    /// No config.json, an unknown architecture without a spec, a missing or invalid key (named).
    pub fn load(dir: &Path, spec: Option<&TargetSpec>) -> Result<Self> {
        let config = Fields::read(dir, "config.json")?;
        let text = text_config(&config)?;
        let mut facts = Self::from_fields(&config, &text, spec)
            .map_err(|error| spec::with_example(error, dir, &config, &text))?;
        if dir.join("generation_config.json").is_file() {
            let more = Fields::read(dir, "generation_config.json")?.tokens("eos_token_id")?;
            facts.eos_token_ids.extend(more);
        }
        facts.eos_token_ids.sort_unstable();
        facts.eos_token_ids.dedup();
        Ok(facts)
    }

    fn from_fields(config: &Fields, text: &Fields, spec: Option<&TargetSpec>) -> Result<Self> {
        let unset = TargetSpec::default();
        let described = spec.is_some();
        let spec = spec.unwrap_or(&unset);
        let name = architecture_name(config, text)?;
        let known = HeadFacts::find(config, text)?;
        if known.is_none() && (!described || spec.norm_kind.is_none()) {
            let path = config.path().into();
            return Err(Error::UnknownTarget { path, found: name, example: String::new() });
        }
        // A target with a spec has the usual keys and only the constants that the spec gives.
        let family = known.unwrap_or(HeadFacts::rms(1e-6));
        let required = |key, own: Option<i64>| match own {
            Some(value) => Ok(value),
            None => text.required(key, Fields::size),
        };
        let hidden_size = required("hidden_size", spec.hidden_size)?;
        let layers = match spec.num_hidden_layers {
            Some(layers) => layers,
            None => layer_count(text)?,
        };
        Ok(Self {
            architecture: name,
            hidden_size,
            num_hidden_layers: layers as usize,
            vocab_size: match (spec.vocab_size, text.size("vocab_size")?) {
                (Some(rows), _) | (None, Some(rows)) => rows,
                (None, None) => config.required("vocab_size", Fields::size)?,
            },
            max_position_embeddings: max_positions(text, spec)?,
            eos_token_ids: end_tokens(config, text)?,
            pad_token_id: match text.token("pad_token_id")? {
                Some(id) => Some(id),
                None => config.token("pad_token_id")?,
            },
            head: head_numbers(text, &family, spec, hidden_size)?,
            no_last_state: family.no_last_state.filter(|_| {
                // a single stream is the state itself
                text.value("hc_mult").is_none_or(|streams| streams.as_i64() != Some(1))
            }),
            quantization: quantization(config, text)?,
            draft: draft_shape::defaults(config, text, spec, hidden_size)?,
            tensors: spec.tensors(),
            tying: tying(config, text, &family, spec)?,
        })
    }

    /// Default heads, widths and rotary embedding of this target's drafts.
    pub fn draft_defaults(&self) -> &DraftDefaults {
        &self.draft
    }

    /// Whether config.json says that the output projection is tied. A checkpoint without an output
    /// projection is also tied.
    pub fn is_tied(&self) -> bool {
        self.tying == Tying::Tied
    }
}

/// Keys of the nested text configuration in multimodal models.
const TEXT_CONFIGS: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// The text model's fields: those of the file, or nested in it.
fn text_config(config: &Fields) -> Result<Fields> {
    let thinker = config.object("thinker_config")?;
    let outer = thinker.as_ref().unwrap_or(config);
    for key in TEXT_CONFIGS {
        if let Some(text) = outer.object(key)? {
            return Ok(text);
        }
    }
    Ok(thinker.unwrap_or_else(|| config.clone()))
}

fn architecture_name(config: &Fields, text: &Fields) -> Result<String> {
    let first = |fields: &Fields| -> Result<Option<String>> {
        Ok(fields.texts("architectures")?.unwrap_or_default().into_iter().next())
    };
    let named = match first(config)? {
        Some(name) => Some(name),
        None => first(text)?,
    };
    Ok(named.or(config.text("model_type")?).unwrap_or("(none)".into()))
}

/// Number of layers. Hybrid models may give a list, or a pattern with one letter per layer.
fn layer_count(text: &Fields) -> Result<i64> {
    if let Some(kinds) = text.texts("layers_block_type")? {
        return Ok(kinds.len() as i64);
    }
    match text.size("num_hidden_layers")? {
        Some(layers) => Ok(layers),
        None => match text.text("hybrid_override_pattern")? {
            Some(pattern) => Ok(pattern.chars().count() as i64),
            None => Ok(text.required("num_hidden_layers", Fields::size)?),
        },
    }
}

fn max_positions(text: &Fields, spec: &TargetSpec) -> Result<i64> {
    // The default of all engines.
    const USUAL: i64 = 32_768;
    let said = spec.max_position_embeddings.or(text.size("max_position_embeddings")?);
    Ok(said.unwrap_or(USUAL))
}

fn end_tokens(config: &Fields, text: &Fields) -> Result<Vec<i64>> {
    let mut ids = text.tokens("eos_token_id")?;
    ids.extend(config.tokens("eos_token_id")?);
    Ok(ids)
}

fn head_numbers(
    text: &Fields,
    family: &HeadFacts,
    spec: &TargetSpec,
    hidden_size: i64,
) -> Result<HeadNumbers> {
    let eps = match family.eps_keys.iter().find(|key| text.value(key).is_some()) {
        Some(key) => text.number(key)?,
        None => None,
    };
    let (embedding_scale, rounds_embedding_scale) = match family.embedding {
        EmbeddingScale::One => (1.0, false),
        EmbeddingScale::RootOfWidth => ((hidden_size as f64).sqrt(), true),
        EmbeddingScale::Key(key) => (text.number(key)?.unwrap_or(1.0), false),
    };
    let logit_scale = match family.logits {
        LogitScale::One => 1.0,
        LogitScale::Over(key) => 1.0 / text.number(key)?.unwrap_or(1.0),
        LogitScale::Times(key, usual) => text.number(key)?.unwrap_or(usual),
    };
    let cap = "final_logit_softcapping";
    let softcap = match text.has(cap) {
        true => text.number(cap)?,
        false => family.softcap,
    };
    let numbers = HeadNumbers {
        norm: spec.norm_kind.unwrap_or(family.norm),
        norm_eps: spec.norm_eps.or(eps).unwrap_or(family.eps),
        embedding_scale: spec.embedding_scale.unwrap_or(embedding_scale),
        rounds_embedding_scale: rounds_embedding_scale && spec.embedding_scale.is_none(),
        logit_scale: spec.logit_scale.unwrap_or(logit_scale),
        softcap: spec.final_logit_softcapping.or(softcap),
    };
    if !(numbers.logit_scale.is_finite() && numbers.logit_scale != 0.0) {
        let key = match family.logits {
            LogitScale::Over(key) | LogitScale::Times(key, _) => key,
            LogitScale::One => "logit_scale",
        };
        return Err(text.refuse(key, "a number other than zero is needed"));
    }
    if numbers.softcap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
        return Err(text.refuse(cap, "a positive number is needed"));
    }
    Ok(numbers)
}

/// From both levels of the configuration, or else the family's default.
fn tying(config: &Fields, text: &Fields, family: &HeadFacts, spec: &TargetSpec) -> Result<Tying> {
    let key = "tie_word_embeddings";
    if spec.head.is_some() {
        return Ok(Tying::ByAbsence);
    }
    let said = match (config.value(key), text.value(key)) {
        (Some(_), _) => Some(config.flag(key)?),
        (None, Some(_)) => Some(text.flag(key)?),
        (None, None) => None,
    };
    Ok(if said.unwrap_or(family.tied) { Tying::Tied } else { Tying::ByAbsence })
}

fn quantization(config: &Fields, text: &Fields) -> Result<Option<String>> {
    for fields in [config, text] {
        if let Some(quantization) = fields.object("quantization_config")? {
            let method = quantization.text("quant_method")?;
            return Ok(Some(method.unwrap_or("(not named)".into())));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
