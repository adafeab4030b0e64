//! The block that a chunk's text comes from, for clients that show how an answer was decoded.

use dflash_chat::ChatTokenizer;
use dflash_decode::Block;
use serde_json::{Value, json};

/// A verified block, or a step without one, with the text of each new token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockReport {
    /// Tokens that were proposed, and how many of these the target accepted.
    proposed: usize,
    accepted: usize,
    /// The text of the proposals that were rejected.
    rejected: String,
    /// The text that each new token made certain: the accepted ones, then the target's own. A token
    /// amid a character or a stop string has none, and the token that completes it has all.
    tokens: Vec<String>,
}

impl BlockReport {
    /// Of a step's `block`, before its tokens.
    pub(crate) fn of(block: Option<&Block>, tokenizer: &ChatTokenizer) -> Self {
        let (proposed, accepted) =
            block.map_or((&[][..], 0), |block| (&block.proposed[..], block.accepted));
        let rejected = tokenizer.decode(&proposed[accepted..], true).unwrap_or_default();
        Self { proposed: proposed.len(), accepted, rejected, tokens: Vec::new() }
    }

    pub(crate) fn add_token(&mut self) {
        self.tokens.push(String::new());
    }

    /// Adds to the newest token.
    pub(crate) fn add_text(&mut self, text: &str) {
        if let Some(token) = self.tokens.last_mut() {
            token.push_str(text);
        }
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "proposed": self.proposed,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "tokens": self.tokens,
        })
    }
}
