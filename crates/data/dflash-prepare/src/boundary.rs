//! Loss masks by render boundary.
//!
//! Before assistant turn j a server shows the target the conversation rendered with the generation
//! prompt (P). The full render (F) appends what the target then wrote, so the part of F after P is
//! supervised: the answer's text and its end of turn, but not the white space that a template puts
//! behind the end of turn. This works for any template without knowing its markers. Three
//! complications:
//!
//! - F may not start with P: some generation prompts open and close an empty reasoning block that
//!   recorded answers do not repeat, and some templates render the history differently once the
//!   answer is there. The answer is then found by its own text ([`find_answer`]) and appended to P,
//!   which is the context that a server shows. Only where P leaves a reasoning block open, which the
//!   recorded answer does not close, does the answer keep the context that F gives it.
//! - Some templates print the end of a turn with the next turn only (GLM: `<|user|>`). It is
//!   supervised too, and after the last turn it is appended to the render.
//! - Some templates rewrite history (they drop earlier reasoning): each turn then needs its own
//!   sample. If every F is a prefix of the next, one sample with several spans is equivalent.

use std::ops::Range;

use dflash_chat::{ChatTokenizer, Conversation, Error, Message, Role, SegmentCache};
use dflash_data::Sample;
use serde_json::Value;

use crate::answer::{Renders, find_answer, lacks_reasoning, text_of, with_other_answer};
use crate::outcome::{Answers, DropReason};

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
    /// How the answers were found.
    pub answers: Answers,
}

/// One assistant turn: its render and the span of its answer.
struct Turn {
    full: Vec<i64>,
    answer: Range<usize>,
}

/// A render as text and as token ids.
struct Render {
    text: String,
    ids: Vec<i64>,
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
    let answers = Answers::default();
    let mut renderer = Renderer { tokenizer, conversation, cache, longest, is_cut: false, answers };
    let mut turns = Turns::new(longest);
    let mut unprinted_calls = 0;
    let within_reach = within_reach(conversation, seq_length);
    for (index, message) in conversation.messages.iter().enumerate() {
        if index == 0 || message.role != Role::Assistant || message.context_only {
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
    let answers = renderer.answers;
    Ok(ConversationRows { samples: turns.into_samples(), unprinted_calls, answers })
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
    answers: Answers,
}

impl Renderer<'_> {
    fn turn(&mut self, index: usize) -> Result<Turn, Refusal> {
        let messages = self.conversation.messages.as_slice();
        let mut prompt = self.render(&messages[..index], true)?;
        let mut full = self.render(&messages[..=index], false)?;
        self.cut([&mut prompt.ids, &mut full.ids]);
        let (mut ids, boundary) = if full.ids.starts_with(&prompt.ids) {
            self.check_printed(index, &prompt, &full)?;
            self.answers.after_prompt += 1;
            (full.ids.clone(), prompt.ids.len())
        } else {
            self.found_by_text(index, &prompt, &full)?
        };
        let mut end = self.end_of_turn(&ids[boundary..]).map(|length| boundary + length);
        if end.is_none() && !self.is_cut {
            ids.extend(self.end_in_next_turn(index, &full.text)?);
            end = self.end_of_turn(&ids[boundary..]).map(|length| boundary + length);
        }
        self.answers.without_end += u64::from(end.is_none() && !self.is_cut);
        Ok(Turn { answer: boundary..end.unwrap_or(ids.len()), full: ids })
    }

    /// Refuses a turn whose text the template leaves out, such as text in parts: what it prints after
    /// the prompt would be learned as an empty answer.
    fn check_printed(&self, index: usize, prompt: &Render, full: &Render) -> Result<(), Refusal> {
        let messages = &self.conversation.messages[..=index];
        let text = text_of(&messages[index].content);
        let answer = full.text.strip_prefix(&prompt.text).unwrap_or(&full.text);
        if answer.contains(text) {
            return Ok(());
        }
        match self.text(&with_other_answer(messages), false) {
            Ok(other) if other == full.text => Err(Refusal::Dropped(DropReason::AnswerNotFound)),
            _ => Ok(()),
        }
    }

    /// The row of a turn whose render does not start with its generation prompt, and where the
    /// answer starts in it.
    fn found_by_text(
        &mut self,
        index: usize,
        prompt: &Render,
        full: &Render,
    ) -> Result<(Vec<i64>, usize), Refusal> {
        let messages = self.conversation.messages.as_slice();
        let asked = text_of(&messages[index - 1].content);
        let before = self.text(&messages[..index], false).ok();
        let other = self.text(&with_other_answer(&messages[..=index]), false).ok();
        let found = other.and_then(|other| {
            let (full, prompt) = (full.text.as_str(), prompt.text.as_str());
            find_answer(Renders { full, other: &other, prompt, before: before.as_deref(), asked })
        });
        let Some(found) = found else {
            return Err(Refusal::Dropped(DropReason::AnswerNotFound));
        };
        let answer = &full.text[found.answer..];
        if !lacks_reasoning(&prompt.text, answer) {
            let joined = format!("{}{answer}", prompt.text);
            let mut ids = self.encode(&joined)?;
            let mut context = prompt.ids.clone();
            self.cut([&mut context, &mut ids]);
            self.answers.in_server_context += 1;
            let boundary = common_length(&ids, &context);
            return Ok((ids, boundary));
        }
        let mut ids = full.ids.clone();
        let mut context = self.encode(&full.text[..found.own_context])?;
        self.cut([&mut context, &mut ids]);
        self.answers.in_own_context += 1;
        let boundary = common_length(&ids, &context);
        Ok((ids, boundary))
    }

    /// Tokens of an answer up to the first that ends generation, or else up to its last special
    /// token if only white space follows that.
    fn end_of_turn(&self, answer: &[i64]) -> Option<usize> {
        if let Some(end) = answer.iter().position(|&id| self.tokenizer.ends_answers(id)) {
            return Some(end + 1);
        }
        let end = 1 + answer.iter().rposition(|&id| self.tokenizer.is_special(id))?;
        self.is_white_space(&answer[end..]).then_some(end)
    }

    /// The end of a turn that the template prints with the next one, as GLM's `<|user|>`: the
    /// tokens up to the first that ends generation, if only white space stands before it. After the
    /// last turn a user's is assumed.
    fn end_in_next_turn(&mut self, index: usize, full: &str) -> Result<Vec<i64>, Error> {
        let turns = self.conversation.messages[..=index].to_vec();
        // A template may refuse these; turns of the conversation are rendered for their own sake.
        let mut behind = self.printed_with_next(&turns, Some(full));
        if behind.is_none() {
            // Earlier reasoning is dropped once there is a next turn.
            let mut plain = turns;
            if let Some(turn) = plain.last_mut() {
                turn.content = "x".into();
                turn.reasoning_content = None;
            }
            behind = self.printed_with_next(&plain, None);
        }
        let mut ids = self.encode(&behind.unwrap_or_default())?;
        let end = ids.iter().position(|&id| self.tokenizer.ends_answers(id));
        let end = end.filter(|&end| self.is_white_space(&ids[..end]));
        ids.truncate(end.map_or(0, |end| end + 1));
        Ok(ids)
    }

    /// What the template prints after `turns`, whose render is `full` if it is known, when the next
    /// turn follows.
    fn printed_with_next(&self, turns: &[Message], full: Option<&str>) -> Option<String> {
        let assumed = Message::text(Role::User, "x");
        let next = self.conversation.messages.get(turns.len()).unwrap_or(&assumed);
        let longer: Vec<Message> = turns.iter().chain([next]).cloned().collect();
        let full =
            full.map_or_else(|| self.text(turns, false).ok(), |full| Some(full.to_owned()))?;
        Some(self.text(&longer, false).ok()?.strip_prefix(&full)?.to_owned())
    }

    fn is_white_space(&self, ids: &[i64]) -> bool {
        self.tokenizer.decode(ids, false).is_ok_and(|text| text.trim().is_empty())
    }

    fn render(
        &mut self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Render, Error> {
        let text = self.text(messages, add_generation_prompt)?;
        let ids = self.encode(&text)?;
        Ok(Render { text, ids })
    }

    fn encode(&mut self, text: &str) -> Result<Vec<i64>, Error> {
        let start = self.tokenizer.encode_start(text, self.longest, self.cache)?;
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

    /// Whether the turn has tool calls, and the template does not print them: an end of turn after its
    /// text would be learned where the target called a tool.
    fn leaves_calls_out(&self, index: usize) -> Result<bool, Error> {
        let messages = &self.conversation.messages[..=index];
        let turn = &messages[index];
        if turn.tool_calls.is_none() {
            return Ok(false);
        }
        let content = if turn.has_content() { turn.content.clone() } else { "".into() };
        let silent = Message { tool_calls: None, content, ..turn.clone() };
        let without: Vec<Message> = messages[..index].iter().cloned().chain([silent]).collect();
        // A template may refuse a turn without calls; then it does print them.
        let without = self.text(&without, false).ok();
        Ok(without == Some(self.text(messages, false)?))
    }
}

fn common_length(one: &[i64], other: &[i64]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
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
        let end = turn.answer.end.min(turn.full.len());
        let span = turn.answer.start.min(end)..end;
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
