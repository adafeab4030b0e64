//! Counts what happened to the input rows.

use std::collections::BTreeMap;
use std::fmt;

use dflash_chat::NameCounts;
use dflash_data::Sample;
use serde::Serialize;

/// Why a conversation or row was dropped: in words, and in snake case as a key of
/// `dflash_prepare.json`.
#[expect(missing_docs, reason = "the words say what the variants are")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum DropReason {
    #[error("empty conversation")]
    Empty,
    #[error("no assistant turn after another turn")]
    NoAnswer,
    #[error("unknown role")]
    UnknownRole,
    #[error("a turn without content")]
    NoContent,
    /// Counts turns, not rows.
    #[error("assistant turn with neither content nor tool calls")]
    EmptyTurn,
    /// Counts turns, not rows: training on one would teach the draft to say nothing.
    #[error("assistant turn of tool calls, which the chat template does not print")]
    UnprintedCalls,
    #[error("refused by the chat template")]
    TemplateRefused,
    /// What the template prints does not depend on the answer.
    #[error("an answer that the chat template does not print")]
    AnswerNotFound,
    #[error("nothing supervised within --seq-length")]
    NothingSupervised,
    #[error("fewer supervised tokens than --minimum-valid-tokens")]
    TooFewSupervised,
    /// Ends the run unless `--skip-bad-rows` is set.
    #[error("row not understood")]
    BadRow,
}

/// What was dropped for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Dropped {
    /// How many.
    pub count: u64,
    /// The place of the first one, and what was wrong with it.
    pub first: String,
}

/// How the answers in the renders were found: each assistant turn counts once in the first three.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Answers {
    /// The render continues the generation prompt, and the answer is what follows.
    pub after_prompt: u64,
    /// The render does not; the answer was found by its text and follows the generation prompt.
    pub in_server_context: u64,
    /// The prompt opens reasoning that the answer lacks; the answer keeps the render's context.
    pub in_own_context: u64,
    /// Answers whose end of turn the template does not print.
    pub without_end: u64,
}

impl Answers {
    pub(crate) fn absorb(&mut self, later: Self) {
        self.after_prompt += later.after_prompt;
        self.in_server_context += later.in_server_context;
        self.in_own_context += later.in_own_context;
        self.without_end += later.without_end;
    }

    /// What a summary says beyond the number of answers.
    pub(crate) fn exceptions(&self) -> Vec<String> {
        let parts = [
            (self.in_server_context, "found by their text and put after the server's prompt"),
            (self.in_own_context, "without the reasoning that the server's prompt opens"),
            (self.without_end, "without an end of turn, which the template does not print"),
        ];
        let counted = parts.into_iter().filter(|(count, _)| *count > 0);
        counted.map(|(count, what)| format!("{count} {what}")).collect()
    }
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.after_prompt + self.in_server_context + self.in_own_context;
        write!(f, "{all}")?;
        match self.exceptions() {
            parts if parts.is_empty() => Ok(()),
            parts => write!(f, " ({})", parts.join("; ")),
        }
    }
}

/// Counts over a run or a part of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Input rows read.
    pub rows_in: u64,
    /// Samples kept but cut to the sequence length.
    pub truncated: u64,
    /// How answers were found, in rows that were dropped later too.
    pub answers: Answers,
    /// Rows that `dflash regenerate` marked as not finished: an answer was cut at its length limit.
    pub unfinished: u64,
    /// What was dropped, by reason.
    pub dropped: BTreeMap<DropReason, Dropped>,
    /// Turns that were removed from their conversations, or left as context, by reason.
    pub turns_dropped: BTreeMap<DropReason, Dropped>,
    /// Unknown keys of messages, and how many messages have them.
    pub unknown_keys: NameCounts,
    /// Unknown columns of rows, and how many rows have a value there.
    pub unread_columns: NameCounts,
}

impl Tally {
    pub(crate) fn drop(&mut self, reason: DropReason, first: impl FnOnce() -> String) {
        let none = || Dropped { count: 0, first: first() };
        self.dropped.entry(reason).or_insert_with(none).count += 1;
    }

    /// Counts a turn that is not trained on.
    pub(crate) fn drop_turn(&mut self, reason: DropReason, first: impl FnOnce() -> String) {
        let none = || Dropped { count: 0, first: first() };
        self.turns_dropped.entry(reason).or_insert_with(none).count += 1;
    }

    /// Adds the counts of a later part.
    pub(crate) fn absorb(&mut self, later: Self) {
        self.rows_in += later.rows_in;
        self.truncated += later.truncated;
        self.answers.absorb(later.answers);
        self.unfinished += later.unfinished;
        for (reason, Dropped { count, first }) in later.dropped {
            self.dropped.entry(reason).or_insert(Dropped { count: 0, first }).count += count;
        }
        for (reason, Dropped { count, first }) in later.turns_dropped {
            self.turns_dropped.entry(reason).or_insert(Dropped { count: 0, first }).count += count;
        }
        self.unknown_keys.absorb(&later.unknown_keys);
        self.unread_columns.absorb(&later.unread_columns);
    }

    /// `12 refused by the chat template (first: data.jsonl:3: ...); 1 ...`
    pub(crate) fn reasons(&self) -> String {
        let part = |(reason, Dropped { count, first }): (&DropReason, &Dropped)| {
            format!("{count} {reason} (first: {first})")
        };
        let mut parts: Vec<String> =
            self.dropped.iter().chain(&self.turns_dropped).map(part).collect();
        if !self.unknown_keys.is_empty() {
            parts.push(format!("unknown keys in messages: {}", self.keys()));
        }
        parts.join("; ")
    }

    /// `contnt (3 messages), weight (1 message)`
    pub(crate) fn keys(&self) -> String {
        self.unknown_keys.listed("message")
    }

    /// `category (12 rows), id (12 rows)`
    pub(crate) fn columns(&self) -> String {
        self.unread_columns.listed("row")
    }
}

/// Cuts `sample` to `seq_length`; says whether it was cut, or why it is dropped.
pub(crate) fn fit(
    sample: &mut Sample,
    seq_length: usize,
    minimum_valid_tokens: usize,
) -> Result<bool, DropReason> {
    let is_cut = sample.input_ids.len() > seq_length;
    sample.input_ids.truncate(seq_length);
    sample.loss_mask.truncate(seq_length);
    match sample.loss_mask.iter().filter(|&&supervised| supervised).count() {
        0 => Err(DropReason::NothingSupervised),
        valid if valid < minimum_valid_tokens => Err(DropReason::TooFewSupervised),
        _ => Ok(is_cut),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_cut_to_the_sequence_length_or_dropped() {
        let check = |mask: &str, expect: Result<bool, DropReason>| {
            let loss_mask: Vec<bool> = mask.chars().map(|c| c == '1').collect();
            let mut sample = Sample { input_ids: vec![1; loss_mask.len()], loss_mask };
            assert_eq!(fit(&mut sample, 4, 2), expect, "{mask}");
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
