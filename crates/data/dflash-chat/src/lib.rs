//! Conversations, chat templates and tokenizers: what turns messages into token ids.
//!
//! Three steps, each usable alone: [`raw_rows`] streams the rows of a JSON or JSON Lines file,
//! [`parse_row`] recognises the common row layouts, and [`ChatTokenizer`] renders a conversation
//! with the model's own chat template and encodes the text. Ids equal those of Transformers'
//! `apply_chat_template(tokenize=True)`: the template decides about special tokens, the encoder
//! adds none.

mod counts;
mod error;
mod message;
mod reader;
mod row;
mod template;
mod tokenizer;

pub use counts::NameCounts;
pub use error::Error;
pub use message::{Conversation, Message, Role};
pub use reader::{RawRow, RawRows, raw_rows};
pub use row::{
    Row, is_row_column, parse_prompt_row, parse_row, unread_columns, unread_prompt_columns,
};
pub use template::panics_are_caught;
pub use tokenizer::{ChatTokenizer, SegmentCache, SpecialIds, Start, TokenUse, added_tokens};
