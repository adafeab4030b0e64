//! Encoding a text stretch by stretch.
//!
//! A tokenizer first splits its input at the added tokens that are matched verbatim, and then
//! normalizes, splits and encodes each segment between them on its own. So the ids of a text are
//! the ids of its segments in order, and a segment that two renders share needs encoding only once.
//! This fails if a token absorbs the blanks around it or must be a separate word, and if the
//! pre-tokenizer treats the first segment differently (`prepend_scheme` "first"); such tokenizers
//! encode whole texts.

use std::collections::HashMap;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

use crate::error::Error;

/// Bytes of text that a cache holds before it is emptied: a few hundred conversations.
const CACHE_BYTES: usize = 1 << 20;

/// Ids of segments seen before; one cache per thread.
#[derive(Debug, Default)]
pub struct SegmentCache {
    ids: HashMap<Box<str>, Box<[i64]>>,
    bytes: usize,
}

impl SegmentCache {
    fn extend(
        &mut self,
        out: &mut Vec<i64>,
        tokenizer: &Tokenizer,
        stretch: &str,
    ) -> Result<(), Error> {
        if let Some(ids) = self.ids.get(stretch) {
            out.extend_from_slice(ids);
            return Ok(());
        }
        let ids = encode_whole(tokenizer, stretch)?;
        out.extend_from_slice(&ids);
        if self.bytes > CACHE_BYTES {
            self.ids.clear();
            self.bytes = 0;
        }
        self.bytes += stretch.len();
        self.ids.insert(stretch.into(), ids.into());
        Ok(())
    }
}

/// Finds the added tokens that cut a text, as the tokenizer itself does.
#[derive(Debug)]
pub(super) struct Segmenter {
    automaton: AhoCorasick,
    /// Id of each pattern of the automaton.
    ids: Vec<i64>,
}

impl Segmenter {
    /// `None` for tokenizers whose segments depend on their context.
    pub(super) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let pre_tokenizer = serde_json::to_string(&tokenizer.get_pre_tokenizer()).ok()?;
        if pre_tokenizer.contains(r#""prepend_scheme":"first""#) {
            return None;
        }
        let mut tokens: Vec<_> = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| !token.normalized)
            .collect();
        if tokens.iter().any(|(_, token)| token.lstrip || token.rstrip || token.single_word) {
            return None;
        }
        tokens.sort_unstable_by_key(|(id, _)| *id);
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, token)| token.content.as_str()))
            .ok()?;
        Some(Self { automaton, ids: tokens.iter().map(|(id, _)| i64::from(*id)).collect() })
    }

    pub(super) fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        cache: &mut SegmentCache,
    ) -> Result<Vec<i64>, Error> {
        // English text has about four characters per token.
        let mut out = Vec::with_capacity(text.len() / 3);
        let mut start = 0;
        for found in self.automaton.find_iter(text) {
            if found.start() > start {
                cache.extend(&mut out, tokenizer, &text[start..found.start()])?;
            }
            out.push(self.ids[found.pattern().as_usize()]);
            start = found.end();
        }
        if start < text.len() {
            cache.extend(&mut out, tokenizer, &text[start..])?;
        }
        Ok(out)
    }
}

pub(super) fn encode_whole(tokenizer: &Tokenizer, text: &str) -> Result<Vec<i64>, Error> {
    let encoding = tokenizer
        .encode_fast(text, false)
        .map_err(|error| Error::Tokenize { reason: error.to_string() })?;
    Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
}
