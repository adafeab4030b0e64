//! What became of the rows, counted.

use std::collections::BTreeMap;
use std::fmt;

use dflash_data::Sample;

/// Why a conversation or row was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// The conversation has no turns.
    Empty,
    /// No assistant turn answers anything.
    NoAnswer,
    /// A turn's speaker is unknown.
    UnknownRole,
    /// The chat template refused it.
    TemplateRefused,
    /// The renders diverge inside the history.
    Unstable,
    /// Nothing supervised is left within the sequence length.
    NothingSupervised,
    /// Fewer supervised tokens than asked for.
    TooFewSupervised,
    /// The row could not be understood, and `--skip-bad-rows` is set.
    BadRow,
}

impl DropReason {
    /// The key in `dflash_prepare.json`.
    pub fn key(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::NoAnswer => "no_answer",
            Self::UnknownRole => "unknown_role",
            Self::TemplateRefused => "template_refused",
            Self::Unstable => "unstable_template",
            Self::NothingSupervised => "nothing_supervised",
            Self::TooFewSupervised => "too_few_supervised",
            Self::BadRow => "bad_row",
        }
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "empty conversation",
            Self::NoAnswer => "no assistant turn after another turn",
            Self::UnknownRole => "unknown role",
            Self::TemplateRefused => "refused by the chat template",
            Self::Unstable => "the chat template rewrites history at the answer",
            Self::NothingSupervised => "nothing supervised within --seq-length",
            Self::TooFewSupervised => "fewer supervised tokens than --minimum-valid-tokens",
            Self::BadRow => "row not understood",
        })
    }
}

/// Counts over a run or a part of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Input rows read.
    pub rows_in: u64,
    /// Rows kept but cut to the sequence length.
    pub truncated: u64,
    /// Dropped, by reason, with the first example's place and words.
    pub dropped: BTreeMap<DropReason, (u64, String)>,
}

impl Tally {
    pub(crate) fn drop(&mut self, reason: DropReason, example: impl FnOnce() -> String) {
        self.dropped.entry(reason).or_insert_with(|| (0, example())).0 += 1;
    }

    /// Adds the counts of a later part.
    pub(crate) fn absorb(&mut self, later: Self) {
        self.rows_in += later.rows_in;
        self.truncated += later.truncated;
        for (reason, (count, example)) in later.dropped {
            self.dropped.entry(reason).or_insert((0, example)).0 += count;
        }
    }

    /// `12 refused by the chat template (first: data.jsonl:3: ...); 1 ...`
    pub(crate) fn reasons(&self) -> String {
        let parts: Vec<String> = self
            .dropped
            .iter()
            .map(|(reason, (count, example))| format!("{count} {reason} (first: {example})"))
            .collect();
        parts.join("; ")
    }
}

/// How rows are cut and which are kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) seq_length: usize,
    pub(crate) minimum_valid_tokens: usize,
}

impl Window {
    /// Cuts `sample` to the window; says whether it was cut, or why it is dropped.
    pub(crate) fn fit(&self, sample: &mut Sample) -> Result<bool, DropReason> {
        let is_cut = sample.input_ids.len() > self.seq_length;
        sample.input_ids.truncate(self.seq_length);
        sample.loss_mask.truncate(self.seq_length);
        match sample.loss_mask.iter().filter(|&&supervised| supervised).count() {
            0 => Err(DropReason::NothingSupervised),
            valid if valid < self.minimum_valid_tokens => Err(DropReason::TooFewSupervised),
            _ => Ok(is_cut),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_to_the_window_or_dropped() {
        let check = |mask: &str, expect: Result<bool, DropReason>| {
            let loss_mask: Vec<bool> = mask.chars().map(|c| c == '1').collect();
            let mut sample = Sample { input_ids: vec![1; loss_mask.len()], loss_mask };
            let window = Window { seq_length: 4, minimum_valid_tokens: 2 };
            assert_eq!(window.fit(&mut sample), expect, "{mask}");
            assert_eq!(sample.input_ids.len(), mask.len().min(4));
            assert_eq!(sample.loss_mask.len(), mask.len().min(4));
        };
        check("0011", Ok(false));
        check("00111", Ok(true));
        check("00001", Err(DropReason::NothingSupervised));
        check("", Err(DropReason::NothingSupervised));
        check("00011", Err(DropReason::TooFewSupervised));
    }

    #[test]
    fn tallies_keep_the_first_example() {
        let mut first = Tally { rows_in: 2, ..Tally::default() };
        first.drop(DropReason::Empty, || "a:1".into());
        first.drop(DropReason::Empty, || "a:2".into());
        let mut second = Tally { rows_in: 1, truncated: 1, ..Tally::default() };
        second.drop(DropReason::Empty, || "b:1".into());
        second.drop(DropReason::BadRow, || "b:2".into());
        first.absorb(second);
        assert_eq!((first.rows_in, first.truncated), (3, 1));
        assert_eq!(
            first.reasons(),
            "3 empty conversation (first: a:1); 1 row not understood (first: b:2)"
        );
    }
}
