//! What happened to the input rows, counted.

use std::collections::BTreeMap;

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
    /// Of a turn, not of a row.
    #[error("assistant turn with neither content nor tool calls")]
    EmptyTurn,
    /// Of a turn, not of a row: training on it would teach the draft to say nothing.
    #[error("assistant turn of tool calls, which the chat template does not print")]
    UnprintedCalls,
    #[error("refused by the chat template")]
    TemplateRefused,
    /// The renders diverge inside the history, so no boundary can be trusted.
    #[error("the chat template rewrites history at the answer")]
    UnstableTemplate,
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

/// Counts over a run or a part of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Input rows read.
    pub rows_in: u64,
    /// Samples kept but cut to the sequence length.
    pub truncated: u64,
    /// What was dropped, by reason.
    pub dropped: BTreeMap<DropReason, Dropped>,
    /// Turns that were removed from their conversations, or left as context, by reason.
    pub turns_dropped: BTreeMap<DropReason, Dropped>,
    /// Unknown keys of messages, and how many messages have them.
    pub unknown_keys: BTreeMap<String, u64>,
    /// Unknown columns of rows, and how many rows have a value there.
    pub unread_columns: BTreeMap<String, u64>,
}

/// Maximum number of unknown keys that are listed separately; more occur in data whose keys are
/// values.
const KEYS_SHOWN: usize = 32;
/// Longest name shown, in characters.
const KEY_LENGTH: usize = 40;
/// Stands for the names beyond [`KEYS_SHOWN`].
const OTHER_KEYS: &str = "(others)";

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

    /// Counts messages that have an unknown key.
    pub(crate) fn unknown_key(&mut self, key: &str, messages: u64) {
        count(&mut self.unknown_keys, key, messages);
    }

    /// Counts rows that have an unknown column.
    pub(crate) fn unread_column(&mut self, name: &str, rows: u64) {
        count(&mut self.unread_columns, name, rows);
    }

    /// Adds the counts of a later part.
    pub(crate) fn absorb(&mut self, later: Self) {
        self.rows_in += later.rows_in;
        self.truncated += later.truncated;
        for (reason, Dropped { count, first }) in later.dropped {
            self.dropped.entry(reason).or_insert(Dropped { count: 0, first }).count += count;
        }
        for (reason, Dropped { count, first }) in later.turns_dropped {
            self.turns_dropped.entry(reason).or_insert(Dropped { count: 0, first }).count += count;
        }
        for (key, messages) in later.unknown_keys {
            self.unknown_key(&key, messages);
        }
        for (name, rows) in later.unread_columns {
            self.unread_column(&name, rows);
        }
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
        listed(&self.unknown_keys, "message")
    }

    /// `category (12 rows), id (12 rows)`
    pub(crate) fn columns(&self) -> String {
        listed(&self.unread_columns, "row")
    }
}

/// Counts under `name`, or under [`OTHER_KEYS`] if there are too many names already.
fn count(names: &mut BTreeMap<String, u64>, name: &str, times: u64) {
    let name: String = name.chars().take(KEY_LENGTH).collect();
    let shown = names.len() - usize::from(names.contains_key(OTHER_KEYS));
    let has_room = shown < KEYS_SHOWN || names.contains_key(&name);
    let name = if has_room { name } else { OTHER_KEYS.to_owned() };
    *names.entry(name).or_default() += times;
}

/// `a (3 messages), b (1 message)`
fn listed(names: &BTreeMap<String, u64>, noun: &str) -> String {
    let part = |(name, count): (&String, &u64)| {
        let plural = if *count == 1 { "" } else { "s" };
        format!("{} ({count} {noun}{plural})", name.escape_debug())
    };
    names.iter().map(part).collect::<Vec<_>>().join(", ")
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
    fn unknown_keys_are_counted_within_bounds() {
        let mut chunk = Tally::default();
        chunk.unknown_key("a\u{1b}[2J", 1);
        (0..1000).for_each(|n| chunk.unknown_key(&format!("k{n:04}"), 1));
        let mut whole = Tally::default();
        whole.absorb(chunk.clone());
        whole.absorb(chunk);
        assert_eq!(whole.unknown_keys.len(), KEYS_SHOWN + 1);
        assert_eq!(whole.unknown_keys.values().sum::<u64>(), 2002);
        assert!(
            whole.keys().starts_with("(others) (1938 messages), a\\u{1b}[2J (2 messages), k0000")
        );
        let mut long = Tally::default();
        long.unknown_key(&"x".repeat(1 << 20), 1);
        assert_eq!(long.keys(), format!("{} (1 message)", "x".repeat(KEY_LENGTH)));
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
