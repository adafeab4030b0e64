//! Which target a dataset was prepared for, as recorded in `dflash_prepare.json` beside the shards.

use std::io::ErrorKind;
use std::path::Path;

use dflash_identity::{Error as IdentityError, TargetIdentity, short_name, tokenizer_digest};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Error;

/// The file that records where a dataset comes from. `datasets` does not keep it.
const FILE: &str = "dflash_prepare.json";

/// The target whose tokenizer and chat template made the samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedFor {
    /// The target's name.
    pub name: String,
    /// The model's identity, if more than its tokenizer was available.
    pub target: Option<TargetIdentity>,
    /// Digest of tokenizer and chat template, which determine the samples.
    pub tokenizer: Option<String>,
}

impl PreparedFor {
    /// What data prepared with the model in `dir`, which the user called `name`, records.
    ///
    /// # Errors
    /// A file of the model that cannot be read.
    pub fn of(dir: &Path, name: &str) -> Result<Self, IdentityError> {
        Ok(Self {
            name: short_name(name, dir),
            target: TargetIdentity::read_if_any(dir, name)?,
            tokenizer: tokenizer_digest(dir)?,
        })
    }

    /// The record of the dataset in `dir`.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, Error> {
        let Some(mut document) = preparation(dir)? else { return Ok(None) };
        let entry = serde_json::from_value(document["prepared_for"].take());
        entry.map_err(|source| Error::Json { path: dir.join(FILE), source })
    }
}

/// The whole preparation record of the dataset in `dir`.
pub(crate) fn preparation(dir: &Path) -> Result<Option<Value>, Error> {
    let path = dir.join(FILE);
    let text = match std::fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|source| Error::Read { path: path.clone(), source })?,
    };
    serde_json::from_slice(&text).map(Some).map_err(|source| Error::Json { path, source })
}
