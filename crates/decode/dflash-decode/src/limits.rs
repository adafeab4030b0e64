//! Limits of answers, and interruption by the user.

use std::sync::atomic::{AtomicBool, Ordering};

use dflash_chat::ChatTokenizer;
use dflash_target::TargetConfig;

use crate::Error;

/// When an answer ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum answer tokens, including the end token.
    pub max_new_tokens: usize,
    /// Tokens that end it.
    pub stop_ids: Vec<i64>,
}

impl Limits {
    /// Ends answers with the end tokens of the target's configuration and tokenizer.
    pub(crate) fn new(
        target: &TargetConfig,
        tokenizer: &ChatTokenizer,
        max_new_tokens: usize,
    ) -> Self {
        let mut stop_ids = target.eos_token_ids.clone();
        stop_ids.extend(tokenizer.special_ids().eos);
        Self { max_new_tokens, stop_ids }
    }
}

/// Rounds a capacity up, so that most later sequences can reuse the cache.
pub(crate) fn roomy(tokens: usize) -> usize {
    tokens.next_multiple_of(256)
}

/// Fails if the user has requested a stop.
pub(crate) fn check(stop: &AtomicBool) -> Result<(), Error> {
    if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}
