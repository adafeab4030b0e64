//! Errors that keep a server from starting, or end it.

/// A failure, naming the address or the model it concerns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum Error {
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    #[error(transparent)]
    Torch(#[from] dflash_torch_sys::Error),
    #[error(transparent)]
    Http(#[from] dflash_http::Error),
    #[error(transparent)]
    Model(#[from] dflash_tensor::Error),
    /// Another process of a split target is gone or does not answer.
    #[error(transparent)]
    Peers(#[from] dflash_dist::Error),
    /// A rank of a split target ran out of memory in a pass.
    #[error("no memory: {reason}")]
    NoMemory { reason: String },
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    #[error(
        "--max-model-len {asked} is more than the target's max_position_embeddings, {limit}; \
         leave it out or lower it"
    )]
    TooLongContext { asked: usize, limit: usize },
    #[error("the target failed on a batch of {tokens} tokens: {reason}")]
    Batch { tokens: usize, reason: String },
    /// Fewer tokens may fit.
    #[error("out of memory on a batch of {tokens} tokens: {reason}")]
    OutOfMemory { tokens: usize, reason: String },
    /// As many tokens have fit before.
    #[error("temporarily out of memory on a batch of {tokens} tokens: {reason}")]
    ShortOfMemory { tokens: usize, reason: String },
    /// An error of the model.
    #[error("the target's rows do not form a record")]
    Rows(#[from] dflash_hidden_states::Error),
}

impl Error {
    /// Whether the model cannot be used any more, because a part of it is gone.
    pub(crate) fn is_lasting(&self) -> bool {
        matches!(self, Self::Peers(_))
    }
}
