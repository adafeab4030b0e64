//! Prompts from data rows, rendered by the target's chat template.

use std::path::Path;

use dflash_chat::{ChatTokenizer, Conversation, Message, Role, Row, parse_prompt_row};
use dflash_eval::sets::{SetRow, open_turns};
use dflash_target::TargetConfig;
use serde_json::Value;

use crate::Error;
use crate::rows::{RowPlace, fits, prompt_ids, read_rows};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prompt {
    /// The rendered turns; empty for a row of token ids.
    messages: Vec<Message>,
    /// Available tools, if any.
    tools: Option<Value>,
    /// User turns that follow this prompt's answer (multi-turn benchmarks).
    later_turns: Vec<Message>,
    /// The rendered prompt, which the answer follows.
    pub(crate) ids: Vec<i64>,
}

/// The room that a prompt must leave for its answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room<'a> {
    /// The target's, whose context holds prompt and answer.
    pub(crate) config: &'a TargetConfig,
    /// Tokens of an answer at most.
    pub(crate) max_new: usize,
}

impl Room<'_> {
    fn fits(self, ids: &[i64]) -> bool {
        fits(ids, self.config, self.max_new)
    }
}

/// At most `limit` prompts of a file, without those that do not fit `room`, and the number of
/// those.
///
/// For a conversation the prompt is everything before its last answer; for user turns without
/// answers between them, the first turn. For token ids it is everything before the first supervised
/// token.
///
/// # Errors
/// The file or a row cannot be read, rendered or answered (the line is named); or no prompt is
/// left.
pub(crate) fn usable_prompts(
    path: &Path,
    limit: Option<usize>,
    tokenizer: &ChatTokenizer,
    room: Room<'_>,
) -> Result<(Vec<Prompt>, usize), Error> {
    let read = |row, place: RowPlace<'_>| prompt_of(&row, place, tokenizer, room.config);
    with_room(read_rows(path, limit, read)?, path, room)
}

/// [`usable_prompts`] for the `rows` of a set that came from `source`.
///
/// # Errors
/// As [`usable_prompts`].
pub(crate) fn usable_rows(
    rows: &[SetRow],
    source: &str,
    tokenizer: &ChatTokenizer,
    room: Room<'_>,
) -> Result<(Vec<Prompt>, usize), Error> {
    let read = |row: &SetRow| {
        prompt_of(&row.row, RowPlace::new(&row.path, row.line), tokenizer, room.config)
    };
    let prompts = rows.iter().map(read).collect::<Result<_, _>>()?;
    with_room(prompts, Path::new(source), room)
}

fn with_room(
    mut prompts: Vec<Prompt>,
    path: &Path,
    room: Room<'_>,
) -> Result<(Vec<Prompt>, usize), Error> {
    let read = prompts.len();
    prompts.retain(|prompt| room.fits(&prompt.ids));
    if prompts.is_empty() {
        let context = room.config.max_position_embeddings;
        return Err(Error::NoPrompts { path: path.into(), context });
    }
    let skipped = read - prompts.len();
    Ok((prompts, skipped))
}

fn prompt_of(
    row: &Value,
    place: RowPlace<'_>,
    tokenizer: &ChatTokenizer,
    target: &TargetConfig,
) -> Result<Prompt, Error> {
    let row = parse_prompt_row(row).map_err(|error| place.error(error))?;
    let (messages, later_turns, tools, ids) = match row {
        Row::Tokenized { input_ids, loss_mask } => {
            let end = loss_mask.iter().position(|&label| label).unwrap_or(input_ids.len());
            (Vec::new(), Vec::new(), None, input_ids[..end].to_vec())
        }
        Row::Conversation(Conversation { mut messages, tools }) => {
            let (first, end) = open_turns(&messages).ok_or_else(|| place.no_question())?;
            place.check_content(&messages[..end])?;
            let later_turns = messages.drain(first..).take(end - first).collect();
            let ids = prompt_ids(tokenizer, &messages, tools.as_ref(), target)
                .map_err(|error| place.error(error))?;
            (messages, later_turns, tools, ids)
        }
    };
    place.check_ids(&ids, target)?;
    Ok(Prompt { messages, tools, later_turns, ids })
}

impl Prompt {
    /// Whether more turns follow its answer.
    pub(crate) fn has_later_turns(&self) -> bool {
        !self.later_turns.is_empty()
    }

    /// Drops the following turns.
    pub(crate) fn first_turn(mut self) -> Self {
        self.later_turns.clear();
        self
    }

    /// Answers the prompt and, in a multi-turn benchmark, the following turns that fit `room`.
    /// `answer` returns the target's tokens.
    pub(crate) fn dialogue(
        &self,
        tokenizer: &ChatTokenizer,
        room: Room<'_>,
        mut answer: impl FnMut(&[i64]) -> Result<Vec<i64>, Error>,
    ) -> Result<(), Error> {
        let mut turn = self.clone();
        loop {
            match turn.after(&answer(&turn.ids)?, tokenizer, room)? {
                Some(next) => turn = next,
                None => return Ok(()),
            }
        }
    }

    /// The prompt of the next turn after the answer `tokens`; `None` after the last turn, or if it
    /// does not fit `room`.
    ///
    /// # Errors
    /// The template rejects the conversation.
    pub(crate) fn after(
        &self,
        tokens: &[i64],
        tokenizer: &ChatTokenizer,
        room: Room<'_>,
    ) -> Result<Option<Self>, dflash_chat::Error> {
        let text = tokenizer.decode(tokens, true)?;
        let next = self.next_turn(&text, tokenizer, room.config)?;
        Ok(next.filter(|next| room.fits(&next.ids)))
    }

    /// The prompt of the next user turn, after `answer` to this one; `None` after the last.
    ///
    /// # Errors
    /// The template refuses the conversation.
    fn next_turn(
        &self,
        answer: &str,
        tokenizer: &ChatTokenizer,
        target: &TargetConfig,
    ) -> Result<Option<Self>, dflash_chat::Error> {
        let [turn, later_turns @ ..] = self.later_turns.as_slice() else { return Ok(None) };
        let mut next = self.clone();
        next.messages.push(Message::text(Role::Assistant, answer));
        next.messages.push(turn.clone());
        next.later_turns = later_turns.to_vec();
        next.ids = prompt_ids(tokenizer, &next.messages, next.tools.as_ref(), target)?;
        Ok(Some(next))
    }
}
