//! The interface between HTTP and model: prompts in, rows of the requested layers out.

use bytes::Bytes;
use dflash_hidden_states::Metadata;
use dflash_target::PackedPrompts;

use crate::error::Error;

/// The model's properties, which the server publishes and checks requests against.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// The model id for requests: the directory's name, or the repository's.
    pub name: String,
    /// The directory.
    pub root: String,
    /// Longest prompt in tokens.
    pub max_model_len: usize,
    /// Where and how the model runs, for the log.
    pub device: String,
    /// The properties that clients check. Its layers are sent if a request names none.
    pub metadata: Metadata,
}

impl ModelFacts {
    /// Whether a request may name layer `id`.
    pub(crate) fn serves(&self, id: u32) -> bool {
        self.metadata.layer_ids.contains(&id) || id == self.metadata.num_hidden_layers
    }
}

/// The rows of each prompt and each layer.
pub type StateRows = Vec<Vec<Bytes>>;

/// The result of a batch.
pub enum Features {
    /// The rows.
    Here(StateRows),
    /// A function that waits for the rows. They are being copied to the host, and the next batch
    /// may begin.
    Coming(Box<dyn FnOnce() -> Result<StateRows, Error>>),
}

impl Features {
    /// Waits for the rows.
    ///
    /// # Errors
    /// The device failed, or the host has no memory for the rows.
    pub fn rows(self) -> Result<StateRows, Error> {
        match self {
            Self::Here(rows) => Ok(rows),
            Self::Coming(rows) => rows(),
        }
    }
}

impl std::fmt::Debug for Features {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Here(_) => "Here",
            Self::Coming(_) => "Coming",
        })
    }
}

/// A model that turns prompts into hidden states. It stays on one thread.
pub trait Featurizer {
    /// The model's properties.
    fn facts(&self) -> &ModelFacts;

    /// Runs `prompts`, each of which attends only to itself.
    ///
    /// Returns for each prompt and each of `layer_ids` (ascending) the rows of its tokens,
    /// row-major `[tokens, hidden_size]` in the dtype of [`Metadata`], little-endian. Each prompt
    /// has its own memory, so that a slow client does not keep the rows of others alive. Layers
    /// beyond the last id need not run. At most one more batch is begun before the rows of a batch
    /// are waited for.
    ///
    /// # Errors
    /// If this batch cannot be run; the model stays usable. A panic because memory ran out counts
    /// as an error.
    fn features(&mut self, prompts: &PackedPrompts, layer_ids: &[u32]) -> Result<Features, Error>;
}
