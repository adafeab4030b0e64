//! Loss masks by render boundary.
//!
//! Before the assistant turn j the target sees the conversation rendered with the generation prompt
//! (P); the full render (F) adds what it has then written. So the part of F after P is supervised.
//! This works for any template, without knowing its markers. Two complications:
//!
//! - Some generation prompts open something that a recorded answer does not repeat (an empty
//!   `<think>`). P is then not a prefix of F, and their common prefix counts as the prompt,
//!   provided that it covers the history.
//! - Some templates rewrite history (they drop earlier reasoning): each turn then needs its own
//!   sample. If every F is a prefix of the next, one sample with several spans is equivalent.

use std::ops::Range;

use dflash_chat::{ChatTokenizer, Conversation, Error, Message, Role, SegmentCache};
use dflash_data::Sample;
use serde_json::Value;

use crate::outcome::DropReason;

/// Why a conversation gives no samples.
#[derive(Debug)]
pub enum Refusal {
    /// It contains nothing to train on.
    Dropped(DropReason),
    /// The template refused or the tokenizer failed.
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The samples of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConversationRows {
    /// The samples, in order; none if no turn is trained on.
    pub samples: Vec<Sample>,
    /// Assistant turns of tool calls that the template does not print. They are context only.
    pub unprinted_calls: usize,
}

/// One assistant turn: the full render and where its answer starts.
struct Turn {
    full: Vec<i64>,
    boundary: usize,
}

/// The samples of a conversation: one if every turn's render continues the previous one's,
/// otherwise one for each assistant turn. A first turn by the assistant is context only, and
/// messages after the last assistant turn are dropped.
///
/// Of a render far longer than `seq_length` tokens only the start is encoded, one token beyond
/// `seq_length`, and a conversation far longer than that is not rendered completely.
///
/// # Errors
/// Why the conversation has no samples.
pub fn conversation_rows(
    tokenizer: &ChatTokenizer,
    conversation: &Conversation,
    cache: &mut SegmentCache,
    seq_length: usize,
) -> Result<ConversationRows, Refusal> {
    if conversation.messages.is_empty() {
        return Err(Refusal::Dropped(DropReason::Empty));
    }
    let longest = seq_length.saturating_add(1);
    let mut renderer = Renderer { tokenizer, conversation, cache, longest, is_cut: false };
    let mut turns = Turns::new(longest);
    let mut unprinted_calls = 0;
    let within_reach = within_reach(conversation, seq_length);
    for (index, message) in conversation.messages.iter().enumerate() {
        if index == 0 || message.role != Role::Assistant {
            continue;
        }
        if turns.reach_end {
            turns.beyond += 1;
            continue;
        }
        // The first turn beyond it still determines where the row is cut.
        turns.reach_end = index >= within_reach;
        if renderer.leaves_calls_out(index)? {
            unprinted_calls += 1;
        } else {
            let turn = renderer.turn(index)?;
            turns.push(turn, renderer.is_cut);
        }
    }
    if turns.is_empty() && unprinted_calls == 0 {
        return Err(Refusal::Dropped(DropReason::NoAnswer));
    }
    Ok(ConversationRows { samples: turns.into_samples(), unprinted_calls })
}

/// How many messages start within the text that can fill `seq_length` tokens.
///
/// Rendering every turn with all before it takes time with the square of their number, so the
/// limit is in bytes and generous: 128 for a token, 256 for what a template puts around a message.
fn within_reach(conversation: &Conversation, seq_length: usize) -> usize {
    let reach = seq_length.saturating_mul(128).max(1 << 20);
    let mut bytes = 0usize;
    let starts_beyond = |message: &Message| {
        let starts_beyond = bytes > reach;
        bytes += 256 + message.reasoning_content.as_ref().map_or(0, String::len);
        bytes += match &message.content {
            Value::String(text) => text.len(),
            other => other.to_string().len(),
        };
        starts_beyond
    };
    conversation.messages.iter().position(starts_beyond).unwrap_or(conversation.messages.len())
}

struct Renderer<'a> {
    tokenizer: &'a ChatTokenizer,
    conversation: &'a Conversation,
    cache: &'a mut SegmentCache,
    /// Maximum number of tokens of a long render.
    longest: usize,
    /// Whether a render was longer.
    is_cut: bool,
}

impl Renderer<'_> {
    fn turn(&mut self, index: usize) -> Result<Turn, Refusal> {
        let mut prompt = self.ids(index, true)?;
        let mut full = self.ids(index + 1, false)?;
        self.cut([&mut prompt, &mut full]);
        if full.starts_with(&prompt) {
            return Ok(Turn { full, boundary: prompt.len() });
        }
        let boundary = prompt.iter().zip(&full).take_while(|(a, b)| a == b).count();
        let mut history = self.ids(index, false)?;
        self.cut([&mut history, &mut full]);
        if boundary < history.len() || !full.starts_with(&history) {
            return Err(Refusal::Dropped(DropReason::UnstableTemplate));
        }
        Ok(Turn { full, boundary })
    }

    /// Token ids of the first `turns` messages.
    fn ids(&mut self, turns: usize, add_generation_prompt: bool) -> Result<Vec<i64>, Error> {
        let messages = &self.conversation.messages[..turns];
        let text = self.text(messages, add_generation_prompt)?;
        let start = self.tokenizer.encode_start(&text, self.longest, self.cache)?;
        self.is_cut |= start.is_cut;
        Ok(start.ids)
    }

    fn text(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, Error> {
        let tools = self.conversation.tools.as_ref();
        self.tokenizer.render(messages, tools, add_generation_prompt)
    }

    /// Renders are compared with each other: once one is cut, all must be.
    fn cut(&self, renders: [&mut Vec<i64>; 2]) {
        if self.is_cut {
            renders.into_iter().for_each(|ids| ids.truncate(self.longest));
        }
    }

    /// Whether the turn has only tool calls, and the template does not print them.
    fn leaves_calls_out(&self, index: usize) -> Result<bool, Error> {
        let messages = &self.conversation.messages[..=index];
        let turn = &messages[index];
        if turn.tool_calls.is_none() || turn.has_content() {
            return Ok(false);
        }
        let silent = Message { tool_calls: None, content: "".into(), ..turn.clone() };
        let without: Vec<Message> = messages[..index].iter().cloned().chain([silent]).collect();
        // A template may refuse a turn without calls; then it does print them.
        let without = self.text(&without, false).ok();
        Ok(without == Some(self.text(messages, false)?))
    }
}

/// The turns of a conversation. As long as every render continues the one before, the last is
/// enough.
struct Turns {
    /// Maximum number of tokens that a sample needs.
    longest: usize,
    /// The render of the last of the turns that continue each other.
    chain: Vec<i64>,
    /// Where each turn's answer in the chain starts and ends.
    spans: Vec<Range<usize>>,
    /// The turns from the first that did not continue the chain.
    after: Vec<Sample>,
    /// Whether the last turn starts beyond any row's end.
    reach_end: bool,
    /// Turns after that one.
    beyond: usize,
}

impl Turns {
    fn new(longest: usize) -> Self {
        let (chain, spans, after) = (Vec::new(), Vec::new(), Vec::new());
        Self { longest, chain, spans, after, reach_end: false, beyond: 0 }
    }

    /// Adds a turn; `is_cut` when its render or an earlier one is only the start.
    fn push(&mut self, mut turn: Turn, is_cut: bool) {
        if is_cut {
            self.chain.truncate(self.longest);
            turn.full.truncate(self.longest);
        }
        let span = turn.boundary..turn.full.len();
        if self.after.is_empty() && turn.full.starts_with(&self.chain) {
            self.spans.push(span);
            self.chain = turn.full;
        } else {
            self.after.push(self.sample(&turn.full, &[span]));
        }
    }

    fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.after.is_empty()
    }

    /// One sample for a chain, otherwise one for each turn.
    fn into_samples(self) -> Vec<Sample> {
        if self.after.is_empty() && !self.spans.is_empty() {
            return vec![self.sample(&self.chain, &self.spans)];
        }
        let of_span = |span: &Range<usize>| {
            let end = span.end.min(self.chain.len());
            self.sample(&self.chain[..end], std::slice::from_ref(span))
        };
        let chained: Vec<Sample> = self.spans.iter().map(of_span).collect();
        let beyond = vec![Sample { input_ids: Vec::new(), loss_mask: Vec::new() }; self.beyond];
        [chained, self.after, beyond].concat()
    }

    fn sample(&self, render: &[i64], spans: &[Range<usize>]) -> Sample {
        let input_ids = render[..render.len().min(self.longest)].to_vec();
        let mut loss_mask = vec![false; input_ids.len()];
        for span in spans {
            let end = span.end.min(loss_mask.len());
            loss_mask[span.start.min(end)..end].fill(true);
        }
        Sample { input_ids, loss_mask }
    }
}
