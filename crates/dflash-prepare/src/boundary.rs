//! Loss masks by render boundary.
//!
//! For the assistant turn j the target would have seen the conversation before it, rendered with
//! the generation prompt (P), and has then written what the full render (F) adds. So F after P is
//! supervised. This holds for any template, without knowing its markers. Two complications:
//!
//! - Some generation prompts open something that a recorded answer does not repeat (an empty
//!   `<think>`): P is then not a prefix of F, and what both share counts as the prompt, provided
//!   that it covers the history.
//! - Some templates rewrite history (they drop earlier reasoning): each turn then needs a sample
//!   of its own. Where every F is a prefix of the next, one sample with several spans says the same.

use dflash_data::Sample;
use dflash_text::{ChatTokenizer, Conversation, Error, Role, SegmentCache};

use crate::outcome::DropReason;

/// Why a conversation gives no samples.
#[derive(Debug)]
pub enum Refusal {
    /// There is nothing in it to train on.
    Dropped(DropReason),
    /// The template refused or the tokenizer failed.
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// One assistant turn: the full render and where its answer starts.
struct Turn {
    full: Vec<i64>,
    boundary: usize,
}

/// The samples of a conversation: one where every turn's render continues the previous one's,
/// otherwise one for each assistant turn. A first turn by the assistant is context only, and
/// messages after the last assistant turn are left out.
///
/// # Errors
/// Why the conversation gives none.
pub fn conversation_rows(
    tokenizer: &ChatTokenizer,
    conversation: &Conversation,
    cache: &mut SegmentCache,
) -> Result<Vec<Sample>, Refusal> {
    if conversation.messages.is_empty() {
        return Err(Refusal::Dropped(DropReason::Empty));
    }
    let mut renderer = Renderer { tokenizer, conversation, cache };
    let mut turns = Vec::new();
    for (index, message) in conversation.messages.iter().enumerate() {
        if index > 0 && message.role == Role::Assistant {
            turns.push(renderer.turn(index)?);
        }
    }
    if turns.is_empty() {
        return Err(Refusal::Dropped(DropReason::NoAnswer));
    }
    let is_chain = turns.windows(2).all(|pair| pair[1].full.starts_with(&pair[0].full));
    Ok(turns.chunks(if is_chain { turns.len() } else { 1 }).map(merge).collect())
}

struct Renderer<'a> {
    tokenizer: &'a ChatTokenizer,
    conversation: &'a Conversation,
    cache: &'a mut SegmentCache,
}

impl Renderer<'_> {
    fn turn(&mut self, index: usize) -> Result<Turn, Refusal> {
        let prompt = self.ids(index, true)?;
        let full = self.ids(index + 1, false)?;
        if full.starts_with(&prompt) {
            return Ok(Turn { full, boundary: prompt.len() });
        }
        let boundary = prompt.iter().zip(&full).take_while(|(a, b)| a == b).count();
        let history = self.ids(index, false)?;
        if boundary < history.len() || !full.starts_with(&history) {
            return Err(Refusal::Dropped(DropReason::UnstableTemplate));
        }
        Ok(Turn { full, boundary })
    }

    /// Token ids of the first `turns` messages.
    fn ids(&mut self, turns: usize, add_generation_prompt: bool) -> Result<Vec<i64>, Error> {
        let messages = &self.conversation.messages[..turns];
        let tools = self.conversation.tools.as_ref();
        let text = self.tokenizer.render(messages, tools, add_generation_prompt)?;
        self.tokenizer.encode_cached(&text, self.cache)
    }
}

/// The last turn's render with the spans of all turns.
fn merge(turns: &[Turn]) -> Sample {
    let input_ids = turns.last().map(|turn| turn.full.clone()).unwrap_or_default();
    let mut loss_mask = vec![false; input_ids.len()];
    for turn in turns {
        loss_mask[turn.boundary..turn.full.len()].fill(true);
    }
    Sample { input_ids, loss_mask }
}
