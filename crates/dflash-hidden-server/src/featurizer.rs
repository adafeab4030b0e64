//! The seam between HTTP and model: prompts in, rows of captured layers out.

use bytes::Bytes;
use dflash_hidden::{Dtype, Metadata};

use crate::error::Error;

/// What the server tells about the model and checks requests against.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// The id that requests may name: the directory's name, or the repository's.
    pub name: String,
    /// The directory.
    pub root: String,
    /// Elements per row.
    pub hidden_size: usize,
    /// Decoder layers; also the id of the last one's output, which is always available.
    pub num_hidden_layers: u32,
    /// Rows of the embedding; token ids are below it.
    pub vocab_size: usize,
    /// Longest prompt in tokens.
    pub max_model_len: usize,
    /// The layers that are sent when a request names none, ascending.
    pub layer_ids: Vec<u32>,
    /// Element type of the rows.
    pub dtype: Dtype,
    /// Where and how the model runs, for the log.
    pub device: String,
}

impl ModelFacts {
    /// Whether a request may ask for layer `id`.
    pub fn serves(&self, id: u32) -> bool {
        self.layer_ids.contains(&id) || id == self.num_hidden_layers
    }

    /// The part that clients check.
    pub fn metadata(&self) -> Metadata {
        Metadata {
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            vocab_size: self.vocab_size,
            layer_ids: self.layer_ids.clone(),
            dtype: self.dtype,
        }
    }
}

/// Prompts one after the other, without padding.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PackedPrompts {
    /// All tokens.
    pub input_ids: Vec<i64>,
    /// First token of each prompt, and last the number of tokens.
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

/// A model that turns prompts into hidden states. It lives on one thread and is used from there.
pub trait Featurizer {
    /// What the model is.
    fn facts(&self) -> &ModelFacts;

    /// Runs `prompts`, each attending to itself only.
    ///
    /// Returns for each of `layer_ids` (ascending) the rows of all tokens, row-major
    /// `[tokens, hidden_size]` in the dtype of [`ModelFacts`], little-endian. Layers beyond the
    /// last id need not run.
    ///
    /// # Errors
    /// When this batch cannot be run; the model stays usable.
    fn features(&mut self, prompts: &PackedPrompts, layer_ids: &[u32])
    -> Result<Vec<Bytes>, Error>;
}
