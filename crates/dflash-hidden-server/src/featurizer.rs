//! The seam between HTTP and model: prompts in, rows of captured layers out.

use bytes::Bytes;
use dflash_hidden::Metadata;
use dflash_model::target::PackedPrompts;

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

/// For each prompt and each layer the rows of its tokens.
pub type Rows = Vec<Vec<Bytes>>;

/// What a batch comes to.
pub enum Features {
    /// The rows.
    Here(Rows),
    /// What waits for the rows. They are on their way to the host, and the next batch may begin.
    Coming(Box<dyn FnOnce() -> Result<Rows, Error>>),
}

impl Features {
    /// The rows, once they are here.
    ///
    /// # Errors
    /// The device has failed, or the host has no memory for the rows.
    pub fn rows(self) -> Result<Rows, Error> {
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
    /// What the model is.
    fn facts(&self) -> &ModelFacts;

    /// Runs `prompts`, each of which attends only to itself.
    ///
    /// Returns for each prompt and each of `layer_ids` (ascending) the rows of its tokens, row-major
    /// `[tokens, hidden_size]` in the dtype of [`Metadata`], little-endian. Each prompt has memory
    /// of its own, so that a client that takes its rows slowly holds no others. Layers beyond the
    /// last id need not run. At most one more batch is begun before rows that are coming are waited for.
    ///
    /// # Errors
    /// When this batch cannot be run; the model stays usable. A panic for want of memory counts as
    /// an error.
    fn features(&mut self, prompts: &PackedPrompts, layer_ids: &[u32]) -> Result<Features, Error>;
}
