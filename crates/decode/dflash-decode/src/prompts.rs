//! Prompts from data rows, rendered by the target's chat template.

use std::path::Path;

use dflash_chat::{ChatTokenizer, Conversation, Message, Role, Row, parse_prompt_row};
use dflash_eval::sets::{SetRow, open_turns};
use dflash_target::TargetConfig;
use serde_json::Value;

use crate::Error;
use crate::rows::{Place, fits, prompt_ids, read_rows};

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

/// At most `limit` prompts of a file, without those that leave no room for `max_new` answer tokens,
/// and the number of those.
///
/// For a conversation the prompt is everything before its last answer; for user turns without
/// answers between them, the first turn. For token ids it is everything before the first supervised
/// token.
///
/// # Errors
/// The file or a row cannot be read, rendered or answered (the line is named); or no prompt is
/// left.
pub(crate) fn usable_prompts(
    (path, limit): (&Path, Option<usize>),
    tokenizer: &ChatTokenizer,
    (target, max_new): (&TargetConfig, usize),
) -> Result<(Vec<Prompt>, usize), Error> {
    let read = |row, place: Place<'_>| prompt_of(&row, place, (tokenizer, target));
    with_room(read_rows((path, limit), read)?, path, (target, max_new))
}

/// [`usable_prompts`] for the `rows` of a set that came from `source`.
///
/// # Errors
/// As [`usable_prompts`].
pub(crate) fn usable_rows(
    (rows, source): (&[SetRow], &str),
    tokenizer: &ChatTokenizer,
    (target, max_new): (&TargetConfig, usize),
) -> Result<(Vec<Prompt>, usize), Error> {
    let read =
        |row: &SetRow| prompt_of(&row.row, Place::new(&row.path, row.line), (tokenizer, target));
    let prompts = rows.iter().map(read).collect::<Result<_, _>>()?;
    with_room(prompts, Path::new(source), (target, max_new))
}

fn with_room(
    mut prompts: Vec<Prompt>,
    path: &Path,
    (target, max_new): (&TargetConfig, usize),
) -> Result<(Vec<Prompt>, usize), Error> {
    let read = prompts.len();
    prompts.retain(|prompt| fits(&prompt.ids, target, max_new));
    if prompts.is_empty() {
        let context = target.max_position_embeddings;
        return Err(Error::NoPrompts { path: path.into(), context });
    }
    let skipped = read - prompts.len();
    Ok((prompts, skipped))
}

fn prompt_of(
    row: &Value,
    place: Place<'_>,
    (tokenizer, target): (&ChatTokenizer, &TargetConfig),
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
            let ids = prompt_ids(tokenizer, (&messages, tools.as_ref()), target)
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

    /// Answers the prompt and, in a multi-turn benchmark, the following turns that leave room for
    /// `max_new` tokens. `answer` returns the target's tokens.
    pub(crate) fn dialogue(
        &self,
        tokenizer: &ChatTokenizer,
        (target, max_new): (&TargetConfig, usize),
        mut answer: impl FnMut(&[i64]) -> Result<Vec<i64>, Error>,
    ) -> Result<(), Error> {
        let mut turn = self.clone();
        loop {
            match turn.after(&answer(&turn.ids)?, tokenizer, (target, max_new))? {
                Some(next) => turn = next,
                None => return Ok(()),
            }
        }
    }

    /// The prompt of the next turn after the answer `tokens`; `None` after the last turn, or if
    /// there is no room for `max_new` tokens.
    ///
    /// # Errors
    /// The template rejects the conversation.
    pub(crate) fn after(
        &self,
        tokens: &[i64],
        tokenizer: &ChatTokenizer,
        (target, max_new): (&TargetConfig, usize),
    ) -> Result<Option<Self>, dflash_chat::Error> {
        let text = tokenizer.decode(tokens, true)?;
        let next = self.next_turn(&text, (tokenizer, target))?;
        Ok(next.filter(|next| fits(&next.ids, target, max_new)))
    }

    /// The prompt of the next user turn, after `answer` to this one; `None` after the last.
    ///
    /// # Errors
    /// The template refuses the conversation.
    fn next_turn(
        &self,
        answer: &str,
        (tokenizer, target): (&ChatTokenizer, &TargetConfig),
    ) -> Result<Option<Self>, dflash_chat::Error> {
        let [turn, later_turns @ ..] = self.later_turns.as_slice() else { return Ok(None) };
        let mut next = self.clone();
        next.messages.push(Message::text(Role::Assistant, answer));
        next.messages.push(turn.clone());
        next.later_turns = later_turns.to_vec();
        next.ids = prompt_ids(tokenizer, (&next.messages, next.tools.as_ref()), target)?;
        Ok(Some(next))
    }
}
