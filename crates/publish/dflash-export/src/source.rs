//! The draft to be exported, from any supported layout.

use std::path::{Path, PathBuf};

use dflash_draft::objective::DraftVocabulary;
use dflash_draft::{Draft, DraftConfig};
use dflash_identity::TargetIdentity;
use tch::{Device, Kind};

use crate::{Result, gguf};

/// A draft in float32 on the CPU, with its metadata.
#[derive(Debug)]
pub struct Source {
    pub(crate) path: PathBuf,
    pub(crate) draft: Draft,
    /// A pruned draft's vocabulary.
    pub(crate) vocabulary: Option<DraftVocabulary>,
    /// The target that it was made for, if recorded.
    pub(crate) made_for: Option<TargetIdentity>,
}

impl Source {
    /// Reads the draft at `path`: a directory in z-lab's or speculators' layout, or a GGUF file.
    ///
    /// # Errors
    /// Damaged files, drafts of another type, missing or misshapen tensors (each named).
    pub fn open(path: &Path) -> Result<Self> {
        let made_for;
        let (draft, vocabulary) = if path.is_file() {
            let read = gguf::read(path)?;
            made_for = read.identity;
            (read.draft, read.vocabulary)
        } else {
            made_for = TargetIdentity::of_draft(path)?;
            (Draft::load(path, Device::Cpu, Kind::Float)?, DraftVocabulary::load(path)?)
        };
        let full = draft.config().vocab_size as usize;
        let vocabulary = vocabulary.filter(|vocabulary| vocabulary.selected().len() < full);
        Ok(Self { path: path.into(), draft, vocabulary, made_for })
    }

    /// Its configuration.
    pub fn config(&self) -> &DraftConfig {
        self.draft.config()
    }

    /// Adds what GGUF and speculators' layout do not record.
    pub(crate) fn complete(self, target_layers: usize, eos: Option<i64>) -> Self {
        let own = self.config();
        let config = DraftConfig {
            num_target_layers: own.num_target_layers.or(Some(target_layers)),
            eos_token_id: own.eos_token_id.clone().or(eos.map(Into::into)),
            ..own.clone()
        };
        Self { draft: Draft::new(config, self.draft.flat().shallow_clone()), ..self }
    }
}
