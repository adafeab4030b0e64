//! A draft checkpoint as loaded for decoding.

use std::path::Path;

use dflash_tensor::Result;
use tch::{Device, Kind};

use super::Draft;
use crate::objective::DraftVocabulary;

/// A draft and its pruned vocabulary, if any.
#[derive(Debug)]
pub struct LoadedDraft {
    /// Layers and head.
    pub draft: Draft,
    /// The pruned vocabulary; `None` if the draft can propose every token.
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

    /// Size of the pruned vocabulary, if any.
    pub fn pruned_size(&self) -> Option<usize> {
        self.vocabulary.as_ref().map(|vocabulary| vocabulary.selected().len())
    }
}

impl From<Draft> for LoadedDraft {
    /// A draft with the full vocabulary.
    fn from(draft: Draft) -> Self {
        Self { draft, vocabulary: None }
    }
}
