//! Target spec: a file that describes a target of an unknown family or overrides known values.

use std::path::Path;

use dflash_formats::fields::Fields;
use dflash_tensor::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{NamedTensors, NormKind};
use crate::head::HeadTensors;

/// The possible keys of a spec; everything else comes from config.json and the checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TargetSpec {
    /// Tensor name of the token embedding [V, H].
    pub embedding: Option<String>,
    /// Tensor name of the final norm's weight `[H]`.
    pub norm: Option<String>,
    /// Tensor name of the final norm's bias `[H]`.
    pub norm_bias: Option<String>,
    /// Tensor name of the output projection [V, H]; the embedding's if tied.
    pub head: Option<String>,
    /// Type of the final norm.
    pub norm_kind: Option<NormKind>,
    /// Epsilon of the final norm.
    pub norm_eps: Option<f64>,
    /// Factor on the embedding.
    pub embedding_scale: Option<f64>,
    /// Factor on logits.
    pub logit_scale: Option<f64>,
    /// Soft cap of logits.
    pub final_logit_softcapping: Option<f64>,
    /// Width of the residual stream.
    pub hidden_size: Option<i64>,
    /// Number of decoder layers.
    pub num_hidden_layers: Option<i64>,
    /// Rows of the embedding.
    pub vocab_size: Option<i64>,
    /// Maximum context length.
    pub max_position_embeddings: Option<i64>,
    /// Query heads of the draft's layers.
    pub num_attention_heads: Option<i64>,
    /// Key heads of the draft's layers.
    pub num_key_value_heads: Option<i64>,
    /// Head size of the draft.
    pub head_dim: Option<i64>,
    /// Width of the draft's MLP.
    pub intermediate_size: Option<i64>,
    /// Base of the draft's rotary frequencies.
    pub rope_theta: Option<f64>,
}

/// Every key of a spec.
const KEYS: [&str; 18] = [
    "embedding",
    "norm",
    "norm_bias",
    "head",
    "norm_kind",
    "norm_eps",
    "embedding_scale",
    "logit_scale",
    "final_logit_softcapping",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
];

/// Minimum similarity for suggesting a key instead of a misspelled one.
const ALIKE: f64 = 0.75;

impl TargetSpec {
    /// Reads the spec at `path`.
    ///
    /// # Errors
    /// A file that cannot be read or parsed, an unknown key, an invalid number.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| Error::Read { path: path.into(), source })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        let refuse = |at: usize, reason: String| {
            let line = 1 + text[..at.min(text.len())].matches('\n').count();
            Error::Spec { path: path.into(), line, reason }
        };
        let spec: Self = toml::from_str(text).map_err(|error: toml::de::Error| {
            let at = error.span().map_or(0, |span| span.start);
            let near = error.span().and_then(|span| nearest(text.get(span)?));
            let near = near.map(|key| format!("; did you mean {key}?")).unwrap_or_default();
            refuse(at, format!("{}{near}", error.message().trim_end()))
        })?;
        match spec.fault() {
            Some((key, expected)) => {
                let starts = |line: &&str| line.trim_start().starts_with(key);
                let line = text.lines().position(|line| starts(&line)).map_or(1, |at| at + 1);
                Err(Error::Spec { path: path.into(), line, reason: format!("{key}: {expected}") })
            }
            None => Ok(spec),
        }
    }

    /// A key with an invalid number, and what is valid.
    fn fault(&self) -> Option<(&'static str, &'static str)> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
        ];
        let numbers = [
            ("norm_eps", self.norm_eps),
            ("embedding_scale", self.embedding_scale),
            ("logit_scale", self.logit_scale),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("rope_theta", self.rope_theta),
        ];
        let size = sizes.iter().find(|(_, size)| size.is_some_and(|size| size <= 0));
        let wrong = |number: f64| !(number.is_finite() && number > 0.0);
        let number = numbers.iter().find(|(_, number)| number.is_some_and(wrong));
        let size = size.map(|(key, _)| (*key, "a positive integer is needed"));
        size.or(number.map(|(key, _)| (*key, "a positive number is needed")))
    }

    pub(super) fn tensors(&self) -> NamedTensors {
        NamedTensors {
            embedding: self.embedding.clone(),
            norm: self.norm.clone(),
            norm_bias: self.norm_bias.clone(),
            head: self.head.clone(),
        }
    }
}

/// The key most similar to `word`.
fn nearest(word: &str) -> Option<&'static str> {
    let likeness = |key: &&&str| strsim::jaro_winkler(word, key);
    let best = KEYS.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) > ALIKE && *best != word).then_some(best)
}

/// Adds an example to an unknown-architecture error, filled in from the checkpoint.
pub(super) fn with_example(error: Error, dir: &Path, config: &Fields, text: &Fields) -> Error {
    let Error::UnknownTarget { path, found, .. } = error else { return error };
    let example = example(dir, config, text);
    Error::UnknownTarget { path, found, example }
}

fn example(dir: &Path, config: &Fields, text: &Fields) -> String {
    let found = HeadTensors::open(dir).ok();
    let [hidden, rows] = ["hidden_size", "vocab_size"].map(|key| {
        let size = |fields: &Fields| fields.value(key).and_then(serde_json::Value::as_i64);
        size(text).or(size(config))
    });
    let candidates = found.map(|tensors| tensors.candidates(hidden, rows)).unwrap_or_default();
    let line = |key: &str, name: Option<&String>, usual: &str, note: &str| {
        let found = if name.is_some() { "" } else { " (not found: look for it)" };
        let name = name.map_or(usual, String::as_str);
        format!("    {key} = {name:?}    # {note}{found}\n")
    };
    let mut lines = line(
        "embedding",
        candidates.embedding.as_ref(),
        "model.embed_tokens.weight",
        "token embedding [V, H]",
    );
    lines += &line("norm", candidates.norm.as_ref(), "model.norm.weight", "final norm [H]");
    if let Some(bias) = &candidates.norm_bias {
        lines += &line("norm_bias", Some(bias), "", "its bias [H]");
    }
    match &candidates.head {
        Some(head) => lines += &line("head", Some(head), "", "output projection [V, H]"),
        None => lines += "    # no head = \"...\": the output projection is the embedding\n",
    }
    let kind = if candidates.norm_bias.is_some() { "layer" } else { "rms" };
    lines += &format!(
        "    norm_kind = {kind:?}    # rms, rms_plus_one (times 1 + w), layer, layer_plus_one\n"
    );
    lines += "    norm_eps = 1e-6\n    # and where the model has them: embedding_scale, logit_scale, \
              final_logit_softcapping";
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<TargetSpec> {
        TargetSpec::parse(Path::new("spec.toml"), text)
    }

    #[test]
    fn every_key_is_listed_and_read() {
        let table: toml::Table = toml::from_str(
            "embedding = 'e'\nnorm = 'n'\nnorm_bias = 'b'\nhead = 'h'\nnorm_kind = 'layer_plus_one'\n\
             norm_eps = 1e-5\nembedding_scale = 2\nlogit_scale = 0.5\nfinal_logit_softcapping = 30\n\
             hidden_size = 8\nnum_hidden_layers = 2\nvocab_size = 9\nmax_position_embeddings = 64\n\
             num_attention_heads = 2\nnum_key_value_heads = 1\nhead_dim = 4\n\
             intermediate_size = 16\nrope_theta = 1e4",
        )
        .unwrap();
        let keys: Vec<&str> = table.keys().map(String::as_str).collect();
        let mut known = KEYS.to_vec();
        known.sort_unstable();
        assert_eq!(
            keys.iter().copied().collect::<std::collections::BTreeSet<_>>(),
            known.iter().copied().collect()
        );
        let spec = parse(&table.to_string()).unwrap();
        let json = serde_json::to_value(&spec).unwrap();
        assert!(json.as_object().unwrap().values().all(|value| !value.is_null()), "{json}");
        assert_eq!(serde_json::from_value::<TargetSpec>(json).unwrap(), spec);
    }

    #[test]
    fn a_mistake_is_named_with_its_line() {
        let check = |text: &str, expected: &[&str]| {
            let message = parse(text).unwrap_err().to_string();
            assert!(expected.iter().all(|part| message.contains(part)), "{message}");
        };
        check("norm_eps = 1e-6\nembeding = 'e'", &["spec.toml, line 2", "did you mean embedding?"]);
        check("\n\nhidden_size = 'wide'", &["line 3"]);
        check("norm_kind = 'batch'", &["line 1", "rms_plus_one"]);
        check("norm = 'n'\nlogit_scale = 0.0", &["line 2", "logit_scale: a positive number"]);
        check("head_dim = -2", &["line 1", "head_dim: a positive integer"]);
        check("norm = ", &["line 1"]);
    }
}
