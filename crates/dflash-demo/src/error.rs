//! What can keep the demo's target from being made.

use std::path::PathBuf;

/// A failed demo target.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory holds a demo made with other settings.
    #[error("{path} was made with other settings; name another --output, or remove the directory")]
    OtherSettings {
        /// The file with the settings found.
        path: PathBuf,
    },
    /// A setting that makes no sense.
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    /// The tokenizer could not be trained.
    #[error("cannot train the demo's tokenizer: {reason}")]
    Tokenizer {
        /// The tokenizer library's answer.
        reason: String,
    },
    /// Stopped by a signal before it was done.
    #[error("interrupted at step {step} of {steps}; nothing of the target was written")]
    Interrupted {
        /// Steps done.
        step: usize,
        /// Steps asked for.
        steps: usize,
    },
    /// A file could not be written or read.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    /// The model could not be saved.
    #[error(transparent)]
    Model(#[from] dflash_model::Error),
    /// The corpus could not be rendered or tokenized.
    #[error(transparent)]
    Text(#[from] dflash_text::Error),
}
