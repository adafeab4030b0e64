//! RoPE scaling of drafts.
//!
//! Supports only what vLLM, SGLang and Transformers compute identically from a draft's config.json:
//! Llama 3's scaling and YaRN over the whole head. YaRN's amplitude is the paper's unless
//! `attention_factor` is given; `mscale` and `mscale_all_dim`, which a target may have, are
//! ignored, because the engines disagree on them (vLLM from 0.30 and Transformers use their ratio,
//! older vLLM and SGLang do not).

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::Result;
use crate::fields::Fields;

/// A scaling that all engines compute identically. Field names are Hugging Face's.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Llama 3: low frequencies are divided by the factor, high ones kept.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: i64,
    },
    /// YaRN: a ramp between divided and kept frequencies, and an amplitude.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        truncate: bool,
        attention_factor: Option<f64>,
        original_max_position_embeddings: i64,
    },
}

/// The scaling that a configuration requests.
#[derive(Debug, Clone, PartialEq)]
pub enum Wanted {
    /// Plain rotary embedding.
    Plain,
    /// One of the scalings above.
    Scaled(RopeScaling),
    /// Another type, by name.
    Other(String),
}

impl RopeScaling {
    /// Reads the scaling from `parameters`, a `rope_parameters` or `rope_scaling`.
    ///
    /// # Errors
    /// A key of the type that is missing or has another type.
    pub fn wanted(parameters: &Fields) -> Result<Wanted> {
        // Configs before 2024 use the key `type`.
        let key = if parameters.has("rope_type") { "rope_type" } else { "type" };
        let required = |key| parameters.required(key, Fields::number);
        let context = || parameters.required("original_max_position_embeddings", Fields::size);
        Ok(match parameters.text(key)?.as_deref() {
            // `mrope` splits positions only for images; for text it is plain.
            None | Some("default" | "mrope") => Wanted::Plain,
            Some("llama3") => Wanted::Scaled(Self::Llama3 {
                factor: required("factor")?,
                low_freq_factor: required("low_freq_factor")?,
                high_freq_factor: required("high_freq_factor")?,
                original_max_position_embeddings: context()?,
            }),
            Some("yarn") => Wanted::Scaled(Self::Yarn {
                factor: required("factor")?,
                beta_fast: parameters.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: parameters.number("beta_slow")?.unwrap_or(1.0),
                truncate: !parameters.has("truncate") || parameters.flag("truncate")?,
                attention_factor: parameters.number("attention_factor")?,
                original_max_position_embeddings: context()?,
            }),
            Some(other) => Wanted::Other(other.into()),
        })
    }

    /// The type's name in config.json.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Llama3 { .. } => "llama3",
            Self::Yarn { .. } => "yarn",
        }
    }

    /// The scaling's keys of config.json.
    pub fn to_json(self) -> Map<String, Value> {
        let Value::Object(mut map) = json!(self) else { unreachable!("a struct is an object") };
        map.retain(|_, value| !value.is_null());
        map
    }

    /// The scaling without an explicit amplitude, as the engines compute identically.
    pub fn with_usual_amplitude(self) -> Self {
        match self {
            Self::Yarn { factor, beta_fast, beta_slow, truncate, .. } => Self::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor: None,
                original_max_position_embeddings: self.original_context(),
            },
            llama3 @ Self::Llama3 { .. } => llama3,
        }
    }

    /// Context length that the unscaled frequencies were trained for.
    pub fn original_context(&self) -> i64 {
        match *self {
            Self::Llama3 { original_max_position_embeddings, .. }
            | Self::Yarn { original_max_position_embeddings, .. } => {
                original_max_position_embeddings
            }
        }
    }

    /// Factor on cosines and sines.
    pub fn amplitude(&self) -> f64 {
        match *self {
            Self::Llama3 { .. } => 1.0,
            Self::Yarn { attention_factor: Some(amplitude), .. } => amplitude,
            Self::Yarn { factor, .. } if factor <= 1.0 => 1.0,
            Self::Yarn { factor, .. } => 0.1 * factor.ln() + 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn wanted(value: &Value) -> Wanted {
        let fields = Fields::parse(Path::new("config.json"), &value.to_string()).unwrap();
        RopeScaling::wanted(&fields).unwrap()
    }

    fn scaling(value: &Value) -> RopeScaling {
        match wanted(value) {
            Wanted::Scaled(scaling) => scaling,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read_and_other_types_are_named() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5,
                          "original_max_position_embeddings": 64});
        let read = scaling(&yarn);
        assert_eq!(scaling(&Value::Object(read.to_json())), read);
        assert_eq!(read.with_usual_amplitude().to_json().get("attention_factor"), None);
        assert_eq!(wanted(&json!({"rope_type": "default"})), Wanted::Plain);
        assert_eq!(wanted(&json!({"type": "longrope"})), Wanted::Other("longrope".into()));
    }
}
