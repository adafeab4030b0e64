//! Rows of a data file, with their location for errors.

use std::path::{Path, PathBuf};

use dflash_chat::{ChatTokenizer, Message, Role, SegmentCache, raw_rows};
use dflash_target::TargetConfig;
use serde_json::Value;

use crate::Error;

/// The location of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPlace<'a> {
    path: &'a Path,
    /// Counted from 1.
    line: usize,
}

impl<'a> RowPlace<'a> {
    /// The line of a file.
    pub(crate) fn new(path: &'a Path, line: usize) -> Self {
        Self { path, line }
    }

    /// File and line.
    pub(crate) fn owned(self) -> (PathBuf, usize) {
        (self.path.into(), self.line)
    }

    /// An error in the row's text.
    pub(crate) fn error(self, source: dflash_chat::Error) -> Error {
        Error::Row { path: self.path.into(), line: self.line, source }
    }

    /// A row without a question.
    pub(crate) fn no_question(self) -> Error {
        Error::NoQuestion { path: self.path.into(), line: self.line }
    }

    /// Checks that turns visible to the target have content, except those with tool calls.
    ///
    /// # Errors
    /// [`Error::NoContent`].
    pub(crate) fn check_content(self, messages: &[Message]) -> Result<(), Error> {
        let is_void =
            |message: &Message| message.role != Role::Assistant && message.content.is_null();
        match messages.iter().any(is_void) {
            true => Err(Error::NoContent { path: self.path.into(), line: self.line }),
            false => Ok(()),
        }
    }

    /// Checks that a prompt is not empty and that the target has an embedding for each token.
    ///
    /// # Errors
    /// [`Error::NoQuestion`], [`Error::Token`].
    pub(crate) fn check_ids(self, ids: &[i64], target: &TargetConfig) -> Result<(), Error> {
        let rows = target.vocab_size;
        match ids.iter().find(|id| !(0..rows).contains(*id)) {
            _ if ids.is_empty() => Err(self.no_question()),
            Some(&id) => Err(Error::Token { path: self.path.into(), line: self.line, id, rows }),
            None => Ok(()),
        }
    }
}

/// Applies `read` to at most `limit` rows of a JSON array or JSONL file.
///
/// # Errors
/// The file cannot be read, or the first error of a row.
pub(crate) fn read_rows<T>(
    path: &Path,
    limit: Option<usize>,
    mut read: impl FnMut(Value, RowPlace<'_>) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    raw_rows(path)?
        .take(limit.unwrap_or(usize::MAX))
        .map(|raw| {
            let raw = raw?;
            read(raw.parse(path)?, RowPlace::new(path, raw.line))
        })
        .collect()
}

/// The ids of a prompt. Of one far beyond the context, only a start that does not fit either.
///
/// # Errors
/// The template rejects the messages, or the tokenizer fails.
pub(crate) fn prompt_ids(
    tokenizer: &ChatTokenizer,
    messages: &[Message],
    tools: Option<&Value>,
    target: &TargetConfig,
) -> Result<Vec<i64>, dflash_chat::Error> {
    let text = tokenizer.render(messages, tools, true)?;
    let most = target.max_position_embeddings as usize + 1;
    Ok(tokenizer.encode_start(&text, most, &mut SegmentCache::default())?.ids)
}

/// Whether a prompt leaves room for `max_new` tokens.
pub(crate) fn fits(ids: &[i64], target: &TargetConfig, max_new: usize) -> bool {
    ids.len() + max_new <= target.max_position_embeddings as usize
}
