//! The parts of a model's repository that commands need.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

/// Weights in one file.
const WEIGHTS: &str = "model.safetensors";
/// Weights in shards: maps each tensor to its file.
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// A tokenizer with its chat template; config.json gives the number of ids.
const TOKENIZER_FILES: [&str; 7] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
    CONFIG,
];
/// A draft without its weights; the second file has the tokens of a pruned vocabulary.
const DRAFT_FILES: [&str; 2] = [CONFIG, "draft_vocabulary.safetensors"];

/// A part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelPart {
    /// A target's tokenizer and chat template.
    Tokenizer,
    /// A target's config.json.
    Config,
    /// A target: configuration, tokenizer and weights.
    Target,
    /// What training a draft needs of a target: configuration, tokenizer, and the shards with its
    /// embedding, final norm and output projection.
    Head,
    /// A draft: configuration, vocabulary and weights.
    Draft,
}

impl ModelPart {
    /// The kind of model that it belongs to.
    pub(crate) fn model(self) -> &'static str {
        match self {
            Self::Tokenizer | Self::Config | Self::Target | Self::Head => "target",
            Self::Draft => "draft",
        }
    }

    /// Whether it is of a draft.
    pub(crate) fn is_draft(self) -> bool {
        self == Self::Draft
    }

    /// The name of this part of `repository` in messages.
    pub(crate) fn of(self, repository: &str) -> String {
        match self {
            Self::Tokenizer => format!("the tokenizer of {repository}"),
            Self::Config => format!("config.json of {repository}"),
            Self::Target | Self::Draft => format!("the {} {repository}", self.model()),
            Self::Head => format!("the head of {repository}"),
        }
    }

    /// Every file except the weights that the repository has.
    pub(crate) fn files(self) -> Vec<String> {
        let mut files: Vec<&str> = match self {
            Self::Tokenizer => TOKENIZER_FILES.to_vec(),
            Self::Config => vec![CONFIG],
            Self::Target | Self::Head => {
                [&TOKENIZER_FILES[..], &["generation_config.json"]].concat()
            }
            Self::Draft => DRAFT_FILES.to_vec(),
        };
        files.extend(self.has_weights().then_some(INDEX));
        files.into_iter().map(str::to_owned).collect()
    }

    /// The weight files, according to the index among the [`Self::files`] in `dir`.
    pub(crate) fn weights(self, dir: &Path) -> Vec<String> {
        match shards(dir, self) {
            _ if !self.has_weights() => Vec::new(),
            Some(shards) if !dir.join(WEIGHTS).is_file() => shards.into_iter().collect(),
            _ => vec![WEIGHTS.to_owned()],
        }
    }

    /// The files of `dir` that make up this part, the weights last.
    ///
    /// # Errors
    /// The name of a required file that is missing.
    pub fn present(self, dir: &Path) -> Result<Vec<String>, String> {
        if let Some(missing) = self.missing(dir) {
            return Err(missing);
        }
        let there = self.files().into_iter().filter(|file| dir.join(file).is_file());
        Ok(there.chain(self.weights(dir)).collect())
    }

    /// The first required file that `dir` lacks.
    pub(crate) fn missing(self, dir: &Path) -> Option<String> {
        let needed = if self == Self::Tokenizer { TOKENIZER } else { CONFIG };
        let mut files = std::iter::once(needed.to_owned()).chain(self.weights(dir));
        files.find(|file| !dir.join(file).is_file())
    }

    fn has_weights(self) -> bool {
        matches!(self, Self::Target | Self::Head | Self::Draft)
    }
}

/// The shards of the part that the index names; only plain file names, because the index comes from
/// outside.
fn shards(dir: &Path, part: ModelPart) -> Option<BTreeSet<String>> {
    let index: Value = serde_json::from_slice(&std::fs::read(dir.join(INDEX)).ok()?).ok()?;
    let tensors = index["weight_map"].as_object()?.iter();
    let wanted = tensors.filter(|(tensor, _)| part != ModelPart::Head || is_outside_layers(tensor));
    let names = wanted.filter_map(|(_, file)| file.as_str());
    Some(
        names
            .filter(|name| !name.contains(['/', '\\', '*', '?', '[', '{']))
            .map(str::to_owned)
            .collect(),
    )
}

/// Whether a tensor is outside all numbered layers and other towers, as every embedding, final norm
/// and output projection is.
fn is_outside_layers(tensor: &str) -> bool {
    const BESIDE: [&str; 5] = ["vis", "audio", "speech", "projector", "mtp"];
    tensor.split('.').all(|part| {
        part.parse::<u64>().is_err() && !BESIDE.iter().any(|other| part.contains(other))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_takes_the_shards_that_hold_it_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let index = serde_json::json!({"weight_map": {
            "language_model.model.embed_tokens.weight": "1.safetensors",
            "language_model.model.layers.0.mlp.experts.7.up_proj.weight": "2.safetensors",
            "language_model.model.norm.weight": "3.safetensors",
            "language_model.lm_head.weight": "3.safetensors",
            "vision_tower.encoder.norm.weight": "4.safetensors",
            "mtp.norm.weight": "5.safetensors",
        }});
        std::fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        assert_eq!(ModelPart::Head.weights(dir.path()), ["1.safetensors", "3.safetensors"]);
        assert_eq!(ModelPart::Target.weights(dir.path()).len(), 5);
    }
}
