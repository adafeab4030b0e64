//! A draft with all that decoding needs of its checkpoint.

use std::path::Path;

use dflash_tensor::Result;
use tch::{Device, Kind};

use super::Draft;
use crate::objective::DraftVocabulary;

/// A draft, and the vocabulary it was trained to say where that is not the target's.
#[derive(Debug)]
pub struct LoadedDraft {
    /// Its layers and its head.
    pub draft: Draft,
    /// The tokens it can propose, where these are not all.
    pub vocabulary: Option<DraftVocabulary>,
}

impl LoadedDraft {
    /// Loads the checkpoint in `dir`.
    ///
    /// # Errors
    /// As [`Draft::load`] and [`DraftVocabulary::load`].
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self> {
        let draft = Draft::load(dir, device, kind)?;
        Ok(Self { draft, vocabulary: DraftVocabulary::load(dir)? })
    }

    /// Tokens it can propose, where these are not all of the target's.
    pub fn pruned_size(&self) -> Option<usize> {
        self.vocabulary.as_ref().map(|vocabulary| vocabulary.selected().len())
    }
}

impl From<Draft> for LoadedDraft {
    /// A draft that says every token.
    fn from(draft: Draft) -> Self {
        Self { draft, vocabulary: None }
    }
}
