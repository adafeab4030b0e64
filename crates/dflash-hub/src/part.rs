//! What of a model's repository a command needs.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

/// Weights in one file.
const WEIGHTS: &str = "model.safetensors";
/// Weights in shards: which tensor is in which.
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// A tokenizer with its chat template; config.json bounds its ids.
const TOKENIZER_FILES: [&str; 6] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    CONFIG,
];
/// A draft but for its weights; the second holds the tokens that a pruned draft can say.
const DRAFT_FILES: [&str; 2] = [CONFIG, "draft_vocabulary.safetensors"];

/// The part of a model that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A target's tokenizer and chat template.
    Tokenizer,
    /// A target's config.json.
    Config,
    /// A target: configuration, tokenizer and weights.
    Target,
    /// A draft: configuration, vocabulary and weights.
    Draft,
}

impl Part {
    /// What kind of model it is a part of.
    pub(crate) fn model(self) -> &'static str {
        match self {
            Self::Tokenizer | Self::Config | Self::Target => "target",
            Self::Draft => "draft",
        }
    }

    /// As messages call the part of `repository`.
    pub(crate) fn of(self, repository: &str) -> String {
        match self {
            Self::Tokenizer => format!("the tokenizer of {repository}"),
            Self::Config => format!("config.json of {repository}"),
            Self::Target | Self::Draft => format!("the {} {repository}", self.model()),
        }
    }

    /// Every file but the weights, as far as the repository has it.
    pub(crate) fn files(self) -> Vec<String> {
        let mut files: Vec<&str> = match self {
            Self::Tokenizer => TOKENIZER_FILES.to_vec(),
            Self::Config => vec![CONFIG],
            Self::Target => [&TOKENIZER_FILES[..], &["generation_config.json"]].concat(),
            Self::Draft => DRAFT_FILES.to_vec(),
        };
        files.extend(self.has_weights().then_some(INDEX));
        files.into_iter().map(str::to_owned).collect()
    }

    /// The files of weights, by the index among the [`Self::files`] in `dir`.
    pub(crate) fn weights(self, dir: &Path) -> Vec<String> {
        match shards(dir) {
            _ if !self.has_weights() => Vec::new(),
            Some(shards) if !dir.join(WEIGHTS).is_file() => shards.into_iter().collect(),
            _ => vec![WEIGHTS.to_owned()],
        }
    }

    /// The files of `dir` that make up this part; the weights last.
    ///
    /// # Errors
    /// The name of one that is missing and nothing works without.
    pub fn present(self, dir: &Path) -> Result<Vec<String>, String> {
        if let Some(missing) = self.missing(dir) {
            return Err(missing);
        }
        let there = self.files().into_iter().filter(|file| dir.join(file).is_file());
        Ok(there.chain(self.weights(dir)).collect())
    }

    /// The first file that `dir` lacks and nothing works without.
    pub(crate) fn missing(self, dir: &Path) -> Option<String> {
        let needed = if self == Self::Tokenizer { TOKENIZER } else { CONFIG };
        let mut files = std::iter::once(needed.to_owned()).chain(self.weights(dir));
        files.find(|file| !dir.join(file).is_file())
    }

    fn has_weights(self) -> bool {
        matches!(self, Self::Target | Self::Draft)
    }
}

/// The shards that the index names; only names of plain files, since they come from elsewhere.
fn shards(dir: &Path) -> Option<BTreeSet<String>> {
    let index: Value = serde_json::from_slice(&std::fs::read(dir.join(INDEX)).ok()?).ok()?;
    let names = index["weight_map"].as_object()?.values().filter_map(Value::as_str);
    Some(
        names
            .filter(|name| !name.contains(['/', '\\', '*', '?', '[', '{']))
            .map(str::to_owned)
            .collect(),
    )
}
