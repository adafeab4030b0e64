//! The seam between HTTP and model: prompts in, rows of captured layers out.

use bytes::Bytes;
use dflash_hidden::Metadata;

use crate::error::Error;

/// What the server says about the model and checks requests against.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// The id that requests may name: the directory's name, or the repository's.
    pub name: String,
    /// The directory.
    pub root: String,
    /// Longest prompt in tokens.
    pub max_model_len: usize,
    /// Where and how the model runs, for the log.
    pub device: String,
    /// The part that clients check. Its layers are sent when a request names none.
    pub metadata: Metadata,
}

impl ModelFacts {
    /// Whether a request may ask for layer `id`.
    pub(crate) fn serves(&self, id: u32) -> bool {
        self.metadata.layer_ids.contains(&id) || id == self.metadata.num_hidden_layers
    }
}

/// Prompts one after the other, without padding.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedPrompts {
    /// All tokens.
    pub input_ids: Vec<i64>,
    /// First token of each prompt, then the number of tokens.
    pub document_starts: Vec<i64>,
}

impl PackedPrompts {
    /// Packs `prompts` in order.
    pub fn new<'a>(prompts: impl Iterator<Item = &'a [i64]>) -> Self {
        let mut packed = Self { input_ids: Vec::new(), document_starts: vec![0] };
        for prompt in prompts {
            packed.input_ids.extend_from_slice(prompt);
            packed.document_starts.push(packed.input_ids.len() as i64);
        }
        packed
    }
}

/// A model that turns prompts into hidden states. It stays on one thread.
pub trait Featurizer {
    /// What the model is.
    fn facts(&self) -> &ModelFacts;

    /// Runs `prompts`, each of which attends only to itself.
    ///
    /// Returns for each prompt and each of `layer_ids` (ascending) the rows of its tokens, row-major
    /// `[tokens, hidden_size]` in the dtype of [`Metadata`], little-endian. Each prompt has memory
    /// of its own, so that a client that takes its rows slowly holds no others. Layers beyond the
    /// last id need not run.
    ///
    /// # Errors
    /// When this batch cannot be run; the model stays usable. A panic for want of memory counts as
    /// an error.
    fn features(
        &mut self,
        prompts: &PackedPrompts,
        layer_ids: &[u32],
    ) -> Result<Vec<Vec<Bytes>>, Error>;
}
