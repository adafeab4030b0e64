//! Sources of proposals: none, the text so far, or a draft.

use dflash_draft::{Draft, LoadedDraft};
use dflash_target::Target;

use crate::Error;
use crate::drafter::{Drafter, check_block};

/// Source of a target's proposals.
#[derive(Debug, Clone, Copy)]
pub enum Proposals<'a> {
    /// None: plain decoding.
    None,
    /// Lookup decoding, at no cost: proposes the tokens that followed an earlier occurrence of the
    /// last tokens.
    Ngram {
        /// Maximum length of the looked-up suffix; shorter ones are tried next, down to one token.
        size: usize,
        /// Tokens proposed at a time.
        tokens: usize,
    },
    /// A draft, limited to its pruned vocabulary if it has one.
    Draft(&'a LoadedDraft),
}

/// [`Proposals`] prepared for a target.
#[derive(Debug)]
pub(super) enum Proposer<'a> {
    None,
    Ngram { size: usize, tokens: usize },
    Draft(Box<Drafter<'a>>),
}

impl<'a> Proposer<'a> {
    /// # Errors
    /// [`Error::LongBlock`], and as [`Drafter::new`].
    pub(super) fn new(target: &'a Target, proposals: Proposals<'a>) -> Result<Self, Error> {
        Ok(match proposals {
            Proposals::None => Self::None,
            Proposals::Ngram { size, tokens } => {
                check_block(target, tokens + 1)?;
                Self::Ngram { size, tokens }
            }
            Proposals::Draft(loaded) => Self::Draft(Box::new(Drafter::new(target, loaded)?)),
        })
    }

    /// Maximum tokens proposed at a time.
    pub(super) fn most(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Ngram { tokens, .. } => *tokens,
            Self::Draft(drafter) => drafter.block().proposals(),
        }
    }

    /// Number of tokens that it could propose after `text`.
    pub(super) fn most_behind(&self, text: &[i64]) -> usize {
        match self {
            Self::Ngram { size, tokens } => look_up(text, *size, *tokens).len(),
            Self::None | Self::Draft(_) => self.most(),
        }
    }

    /// Up to `proposals` looked-up tokens after `text`; none for a draft.
    pub(super) fn looked_up<'t>(&self, text: &'t [i64], proposals: usize) -> &'t [i64] {
        match self {
            Self::Ngram { size, .. } => look_up(text, *size, proposals),
            Self::None | Self::Draft(_) => &[],
        }
    }

    pub(super) fn drafter(&self) -> Option<&Drafter<'a>> {
        if let Self::Draft(drafter) = self { Some(drafter) } else { None }
    }

    pub(super) fn draft(&self) -> Option<&'a Draft> {
        self.drafter().map(|drafter| drafter.draft)
    }
}

/// At most `proposals` tokens that followed the latest earlier occurrence of the longest suffix of
/// `text`, of at most `size` tokens, that occurs earlier.
fn look_up(text: &[i64], size: usize, proposals: usize) -> &[i64] {
    let end = text.len();
    for size in (1..=size.min(end.saturating_sub(1))).rev() {
        let (earlier, last) = (&text[..end - 1], &text[end - size..]);
        if let Some(at) = earlier.windows(size).rposition(|window| window == last) {
            let from = at + size;
            return &text[from..end.min(from + proposals)];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_run_counts_and_of_its_places_the_latest() {
        let check = |text: &[i64], size, proposals, expect: &[i64]| {
            assert_eq!(look_up(text, size, proposals), expect, "{text:?} {size} {proposals}");
        };
        check(&[1, 2, 3, 4, 1, 2], 3, 10, &[3, 4, 1, 2]);
        check(&[1, 2, 3, 4, 1, 2], 3, 1, &[3]);
        check(&[1, 2, 3, 9, 2, 4, 1, 2], 3, 2, &[3, 9]);
        check(&[1, 2, 3, 9, 2, 4, 1, 2], 1, 2, &[4, 1]);
        check(&[7, 7, 7], 3, 10, &[7]);
        check(&[1, 2, 3], 3, 10, &[]);
        check(&[1], 3, 10, &[]);
    }
}
