//! Why a server does not start, or ends.

/// A failure, naming the address or the model it concerns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum Error {
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    #[error(transparent)]
    Http(#[from] dflash_http::Error),
    #[error(transparent)]
    Decode(#[from] dflash_decode::Error),
    #[error(
        "--max-model-len {asked} is more than the target's max_position_embeddings, {limit}; \
         leave it out or lower it"
    )]
    TooLongContext { asked: usize, limit: usize },
}
