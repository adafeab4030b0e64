//! Turn-by-turn regeneration of a conversation's answers.
//!
//! Each answer is generated from the turns before it, including earlier regenerated answers but not
//! the recorded ones. Some recorded assistant turns are kept: an initial turn, which answers
//! nothing, and tool calls whose results follow, because the results belong to those calls.

use std::collections::VecDeque;
use std::path::PathBuf;

use dflash_chat::{ChatTokenizer, Conversation, Message, Role, Row, parse_prompt_row};
use dflash_target::TargetConfig;
use serde_json::{Map, Value, json};

use crate::Error;
use crate::limits::Limits;
use crate::rows::{RowPlace, fits, prompt_ids};

/// What a dialogue needs from the target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Speaker<'a> {
    pub(crate) tokenizer: &'a ChatTokenizer,
    pub(crate) config: &'a TargetConfig,
    pub(crate) limits: &'a Limits,
}

/// A conversation in progress.
#[derive(Debug)]
pub(crate) struct Dialogue {
    /// File and line of its row, counted from 1.
    place: (PathBuf, usize),
    /// The turns up to the next answer; empty for a row of token ids.
    messages: Vec<Message>,
    /// The following turns, grouped up to each next answer.
    later: VecDeque<Vec<Message>>,
    tools: Option<Value>,
    /// Whether the row is just a question.
    is_question: bool,
    /// The prompt of the next answer.
    ids: Vec<i64>,
    /// Whether the target generated each token of the prompt; may be shorter than it.
    mask: Vec<u8>,
    /// Whether every answer in `mask` ended with an end token.
    finished: bool,
    rows: Vec<Value>,
}

/// What follows an answer.
#[derive(Debug)]
pub(crate) enum Next {
    /// Another answer.
    Answer,
    /// The end.
    Done,
    /// A premature end: the next turn does not fit, or the template rejects it.
    Shortened,
}

impl Dialogue {
    /// Reads a row.
    ///
    /// # Errors
    /// A row that cannot be parsed or has no question.
    pub(crate) fn new(
        row: &Value,
        place: RowPlace<'_>,
        speaker: Speaker<'_>,
    ) -> Result<Self, Error> {
        let mut dialogue = Self {
            place: place.owned(),
            messages: Vec::new(),
            later: VecDeque::new(),
            tools: None,
            is_question: row.get("question").is_some_and(Value::is_string),
            ids: Vec::new(),
            mask: Vec::new(),
            finished: true,
            rows: Vec::new(),
        };
        match parse_prompt_row(row).map_err(|error| place.error(error))? {
            Row::Tokenized { input_ids, loss_mask } => {
                let end = loss_mask.iter().position(|&label| label).unwrap_or(input_ids.len());
                dialogue.ids = input_ids[..end].to_vec();
                let question = row.get("question").and_then(Value::as_str);
                let turn = |text: &str| Message::text(Role::User, text);
                dialogue.messages = question.map(turn).into_iter().collect();
            }
            Row::Conversation(Conversation { messages, tools }) => {
                dialogue.later = segments(messages).into();
                dialogue.later.iter().try_for_each(|turns| place.check_content(turns))?;
                dialogue.tools = tools;
                dialogue.messages =
                    dialogue.later.pop_front().ok_or_else(|| place.no_question())?;
                dialogue.is_question &= dialogue.messages.len() == 1
                    && dialogue.later.is_empty()
                    && dialogue.tools.is_none();
                dialogue.ids = dialogue.prompt(speaker).map_err(|error| place.error(error))?;
                dialogue.try_later_turns(speaker).map_err(|error| place.error(error))?;
            }
        }
        place.check_ids(&dialogue.ids, speaker.config)?;
        Ok(dialogue)
    }

    /// The prompt of the next answer.
    pub(crate) fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// An error of its row.
    pub(crate) fn error(&self, source: dflash_chat::Error) -> Error {
        let (path, line) = self.place.clone();
        Error::Row { path, line, source }
    }

    /// Whether the next answer fits.
    pub(crate) fn fits(&self, speaker: Speaker<'_>) -> bool {
        fits(&self.ids, speaker.config, speaker.limits.max_new_tokens)
    }

    /// Adds the answer to the prompt and continues to the next one.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub(crate) fn answer(
        &mut self,
        tokens: &[i64],
        speaker: Speaker<'_>,
    ) -> Result<Next, dflash_chat::Error> {
        let has_end = tokens.last().is_some_and(|token| speaker.limits.stop_ids.contains(token));
        let text_ids = &tokens[..tokens.len() - usize::from(has_end)];
        let text = speaker.tokenizer.decode(text_ids, false)?;
        self.messages.push(Message::text(Role::Assistant, text));
        self.mask.resize(self.ids.len(), 0);
        self.mask.resize(self.ids.len() + tokens.len(), 1);
        self.ids.extend(tokens);
        self.finished &= has_end;
        let Some(turns) = self.later.pop_front() else {
            self.rows.push(self.row());
            return Ok(Next::Done);
        };
        let answered = self.messages.len();
        self.messages.extend(turns);
        let max_new = speaker.limits.max_new_tokens;
        let prompt = match self.prompt(speaker) {
            Ok(prompt) if fits(&prompt, speaker.config, max_new) => prompt,
            // The template may reject an answer.
            Ok(_) | Err(dflash_chat::Error::Render { .. }) => {
                self.messages.truncate(answered);
                self.rows.push(self.row());
                return Ok(Next::Shortened);
            }
            Err(error) => return Err(error),
        };
        if !prompt.starts_with(&self.ids) {
            // The template renders earlier answers differently from how they were generated.
            let turns = self.messages.split_off(answered);
            self.rows.push(self.row());
            self.messages.extend(turns);
            self.mask.clear();
            self.finished = true;
        }
        self.ids = prompt;
        Ok(Next::Answer)
    }

    /// The output rows: one, or one per stretch of answers that the template does not rewrite.
    pub(crate) fn into_rows(self) -> Vec<Value> {
        self.rows
    }

    fn prompt(&self, speaker: Speaker<'_>) -> Result<Vec<i64>, dflash_chat::Error> {
        prompt_ids(speaker.tokenizer, &self.messages, self.tools.as_ref(), speaker.config)
    }

    /// Renders the whole conversation with placeholder answers, to detect template errors before
    /// hours of decoding.
    fn try_later_turns(&self, speaker: Speaker<'_>) -> Result<(), dflash_chat::Error> {
        let mut messages = self.messages.clone();
        for turns in &self.later {
            messages.push(Message::text(Role::Assistant, "-"));
            messages.extend(turns.iter().cloned());
        }
        match self.later.is_empty() {
            true => Ok(()),
            false => speaker.tokenizer.render(&messages, self.tools.as_ref(), true).map(|_| ()),
        }
    }

    fn row(&self) -> Value {
        let mut row = Map::new();
        match self.messages.as_slice() {
            [question, answer] if self.is_question => {
                row.insert("question".into(), question.content.clone());
                row.insert("answer".into(), answer.content.clone());
            }
            // A row of token ids, whose question is not available as text.
            [answer] => {
                row.insert("answer".into(), answer.content.clone());
            }
            messages => {
                row.insert("messages".into(), json!(messages));
                row.extend(self.tools.iter().map(|tools| ("tools".into(), tools.clone())));
            }
        }
        row.insert("input_ids".into(), json!(self.ids));
        row.insert("loss_mask".into(), json!(self.mask));
        row.insert("finished".into(), json!(self.finished));
        Value::Object(row)
    }
}

/// The turns before each answer to generate, without the recorded answers that are replaced. Turns
/// after the last answer are dropped.
fn segments(messages: Vec<Message>) -> Vec<Vec<Message>> {
    let asks =
        |turns: &[Message]| turns.iter().any(|turn| matches!(turn.role, Role::User | Role::Tool));
    let (mut done, mut open) = (Vec::new(), Vec::<Message>::new());
    let mut messages = messages.into_iter().peekable();
    while let Some(message) = messages.next() {
        let stays = match message.role {
            Role::Assistant => {
                let has_results = messages.peek().is_some_and(|next| next.role == Role::Tool);
                has_results || (done.is_empty() && !asks(&open))
            }
            // An answer must be generated between two user turns.
            Role::User => {
                if open.last().is_some_and(|last| last.role == Role::User) {
                    done.push(std::mem::take(&mut open));
                }
                true
            }
            Role::System | Role::Tool => true,
        };
        if stays {
            open.push(message);
        } else if asks(&open) {
            done.push(std::mem::take(&mut open));
        }
    }
    if asks(&open) {
        done.push(open);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_is_made_anew_but_calls_with_results() {
        let check = |roles: &str, expect: &str| {
            let messages = roles.chars().map(|role| match role {
                's' => Message::text(Role::System, "s"),
                'u' => Message::text(Role::User, "u"),
                't' => Message::text(Role::Tool, "t"),
                _ => Message::text(Role::Assistant, "a"),
            });
            let found: Vec<String> = segments(messages.collect())
                .iter()
                .map(|turns| turns.iter().filter_map(|turn| turn.content.as_str()).collect())
                .collect();
            assert_eq!(found.join("|"), expect, "{roles}");
        };
        check("u", "u");
        check("ua", "u");
        check("suauaua", "su|u|u");
        check("suau", "su|u");
        check("uu", "u|u");
        check("auaua", "au|u");
        check("uaaua", "u|u");
        check("uata", "uat");
        check("uat", "uat");
        check("uatataua", "uatat|u");
        check("uas", "u");
        check("uasua", "u|su");
        for nothing in ["", "a", "s", "sa"] {
            check(nothing, "");
        }
    }
}
