//! Errors in making the demo's target.

use std::path::PathBuf;

/// A failed demo target.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} was made with other settings; name another --output, or remove the directory")]
    OtherSettings { path: PathBuf },
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    #[error("cannot train the demo's tokenizer: {reason}")]
    Tokenizer { reason: String },
    #[error("interrupted at step {step} of {steps}; the target was not written")]
    Interrupted { step: usize, steps: usize },
    #[error(transparent)]
    Files(#[from] dflash_io::Error),
    #[error(transparent)]
    Model(#[from] dflash_tensor::Error),
    #[error(transparent)]
    Text(#[from] dflash_chat::Error),
}
