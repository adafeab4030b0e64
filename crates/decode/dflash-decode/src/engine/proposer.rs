//! Where proposals come from: nowhere, the text so far, or a draft.

use dflash_draft::{Draft, LoadedDraft};
use dflash_target::Target;

use crate::Error;
use crate::drafter::{Drafter, check_block};

/// What proposes tokens to a target.
#[derive(Debug, Clone, Copy)]
pub enum Proposals<'a> {
    /// Nothing: plain decoding.
    None,
    /// Look-up decoding, a draft that costs nothing: where the last tokens stood earlier in the text,
    /// what followed them there is proposed.
    Ngram {
        /// The longest run of last tokens that is looked up; shorter ones follow, down to one.
        size: usize,
        /// Tokens proposed at a time.
        tokens: usize,
    },
    /// A draft, which proposes only tokens of its vocabulary where it was trained to say no others.
    Draft(&'a LoadedDraft),
}

/// The same, made ready for a target.
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

    /// Tokens proposed at a time at most.
    pub(super) fn most(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Ngram { tokens, .. } => *tokens,
            Self::Draft(drafter) => drafter.block().proposals(),
        }
    }

    /// Tokens that it could propose behind `text`.
    pub(super) fn most_behind(&self, text: &[i64]) -> usize {
        match self {
            Self::Ngram { size, tokens } => look_up(text, *size, *tokens).len(),
            Self::None | Self::Draft(_) => self.most(),
        }
    }

    /// Up to `proposals` tokens behind `text` that take no pass of a draft.
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

/// What followed the last tokens of `text` where they stood before: of the longest run of at most
/// `size` that is found, and there the latest place, at most `proposals` tokens.
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
