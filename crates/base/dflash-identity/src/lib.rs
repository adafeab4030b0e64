//! Digests that identify a target.
//!
//! A run cannot notice that it got another model of the same shape: the hidden states fit, and the
//! draft learns the wrong thing. So a target has an identity: a digest of the part of its
//! configuration that determines its numbers, and one of its weights, sampled so that it takes
//! milliseconds for a model of any size. The identity is served with hidden states, stored with
//! everything that is made from a target, and compared whenever two of these meet. The name is for
//! people and is not compared, because directories are renamed and repositories mirrored.

mod config;
mod digest;
mod error;
mod name;
mod tokenizer;
mod weights;

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use digest::{file_digest, hex};
pub use error::Error;
pub use name::{same_name, short_name};
pub use tokenizer::tokenizer_digest;

/// A target's identity. Its name is not compared: see [`Self::is_same_as`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetIdentity {
    /// The directory's name, or the repository's on the Hub.
    pub name: String,
    /// Digest of the part of config.json that determines the numbers.
    pub config: String,
    /// Digest of the sampled weights; `None` if they were not available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
}

/// The key of a draft's config.json that holds the target's identity. Serving software ignores keys
/// that it does not know.
const DRAFT_KEY: &str = "dflash_target";

impl TargetIdentity {
    /// The identity of the model in `dir`, which the user called `name`.
    ///
    /// # Errors
    /// No readable config.json, or weights that cannot be read. Absent weights are none.
    pub fn read(dir: &Path, name: &str) -> Result<Self, Error> {
        let model = read_json(&dir.join("config.json"))?;
        Ok(Self {
            name: short_name(name, dir),
            config: config::digest(&model),
            weights: weights::digest(dir, config::is_tied(&model))?,
        })
    }

    /// As [`Self::read`]; `None` if the directory has no config.json, for example if it has only a
    /// tokenizer.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_if_any(dir: &Path, name: &str) -> Result<Option<Self>, Error> {
        dir.join("config.json").is_file().then(|| Self::read(dir, name)).transpose()
    }

    /// Whether both are the same model, as far as can be determined: if one has no weights digest,
    /// only the configuration is compared.
    pub fn is_same_as(&self, other: &Self) -> bool {
        let weights = match (&self.weights, &other.weights) {
            (Some(own), Some(theirs)) => own == theirs,
            _ => true,
        };
        self.config == other.config && weights
    }

    /// The compared digests, without the name: equal for the same files in any location.
    pub fn digests(&self) -> String {
        match &self.weights {
            Some(weights) => format!("config {}, weights {weights}", self.config),
            None => format!("config {}", self.config),
        }
    }

    /// Whether `digests`, as [`Self::digests`] prints them, belong to another model.
    pub fn contradicts(&self, digests: &str) -> bool {
        let (own, theirs) = (self.weights.is_some(), digests.contains(", weights "));
        own == theirs && digests != self.digests()
    }

    /// Records in the config.json of the draft in `draft_dir` that it was made for this target.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn write_into_draft(&self, draft_dir: &Path) -> Result<(), Error> {
        let path = draft_dir.join("config.json");
        let mut config = read_json(&path)?;
        config[DRAFT_KEY] = serde_json::to_value(self).expect("strings print");
        Ok(dflash_io::write_bytes(&path, format!("{config:#}\n").as_bytes())?)
    }

    /// The target that the draft in `draft_dir` was made for; `None` if its config.json does not
    /// say.
    ///
    /// # Errors
    /// No readable config.json, or one whose entry is not an identity.
    pub fn of_draft(draft_dir: &Path) -> Result<Option<Self>, Error> {
        let path = draft_dir.join("config.json");
        match read_json(&path)?.get(DRAFT_KEY) {
            None | Some(Value::Null) => Ok(None),
            Some(entry) => Self::deserialize(entry).map(Some).map_err(|source| Error::Entry {
                path,
                key: DRAFT_KEY,
                source,
            }),
        }
    }
}

impl fmt::Display for TargetIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.digests())
    }
}

fn read_json(path: &Path) -> Result<Value, Error> {
    let text = std::fs::read(path).map_err(|source| Error::Read { path: path.into(), source })?;
    serde_json::from_slice(&text).map_err(|source| Error::Json { path: path.into(), source })
}

#[cfg(test)]
mod tests;
