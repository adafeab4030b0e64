//! The token that fills the unknown slots of a block.
//!
//! It has to be a row of the target's embedding that means nothing: the engines that serve the
//! draft look it up there. A pad, end-of-text or unknown token has a meaning the target learned,
//! and a draft trained on one proposes badly.

use crate::{Error, Result};

/// What a tokenizer says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenizerFacts {
    /// Number of tokens with the added ones, as Hugging Face's `len(tokenizer)`.
    pub len: i64,
    /// The mask token, where it has one.
    pub mask: Option<i64>,
    /// The padding token.
    pub pad: Option<i64>,
    /// The end-of-text token.
    pub eos: Option<i64>,
    /// The token of unknown text.
    pub unk: Option<i64>,
}

/// The mask token: `explicit`, else the tokenizer's, else the first row of the embedding that the
/// tokenizer does not use.
///
/// `embedding_rows` is the (padded) height of the target's embedding.
///
/// # Errors
/// The id is pad, eos or unk, lies outside the embedding, or no row is free.
pub fn resolve_mask_token(
    explicit: Option<i64>,
    tokenizer: TokenizerFacts,
    embedding_rows: i64,
) -> Result<i64> {
    let unused = (tokenizer.len < embedding_rows).then_some(tokenizer.len);
    let id = explicit
        .or(tokenizer.mask)
        .or(unused)
        .ok_or(Error::NoMaskToken { rows: embedding_rows })?;
    match objection(id, tokenizer, embedding_rows) {
        Some(reason) => Err(Error::MaskToken { id, reason, rows: embedding_rows }),
        None => Ok(id),
    }
}

fn objection(id: i64, tokenizer: TokenizerFacts, embedding_rows: i64) -> Option<&'static str> {
    let is = |special: Option<i64>| special == Some(id);
    match () {
        () if !(0..embedding_rows).contains(&id) => Some("is not a row of the target's embedding"),
        () if is(tokenizer.eos) => Some("is the end-of-text token"),
        () if is(tokenizer.pad) => Some("is the padding token"),
        () if is(tokenizer.unk) => Some("is the unknown token"),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: TokenizerFacts =
        TokenizerFacts { len: 90, mask: Some(80), pad: Some(1), eos: Some(2), unk: Some(3) };

    #[test]
    fn the_first_source_that_names_one_wins() {
        let without_mask = TokenizerFacts { mask: None, ..FACTS };
        assert_eq!(resolve_mask_token(Some(7), FACTS, 100).unwrap(), 7);
        assert_eq!(resolve_mask_token(None, FACTS, 100).unwrap(), 80);
        assert_eq!(resolve_mask_token(None, without_mask, 100).unwrap(), 90);
        let full = resolve_mask_token(None, without_mask, 90).unwrap_err().to_string();
        assert!(full.contains("--mask-token-id"), "{full}");
    }

    #[test]
    fn a_token_with_a_meaning_is_refused() {
        let message = |id| resolve_mask_token(Some(id), FACTS, 100).unwrap_err().to_string();
        assert!(message(1).starts_with("mask token 1 is the padding token"));
        assert!(message(2).contains("end-of-text"));
        assert!(message(3).contains("unknown"));
        assert!(message(100).contains("not a row"));
        assert!(message(-1).contains("not a row"));
        let eos_as_mask = TokenizerFacts { mask: Some(2), ..FACTS };
        assert!(resolve_mask_token(None, eos_as_mask, 100).is_err());
    }
}
