//! Where an answer stands in a template's render, found by its own text.

use dflash_chat::Message;
use serde_json::{Value, json};

/// A text that no answer begins with: a character for private use.
const OTHER: &str = "\u{f8ff}";

/// What generation prompts end with when the answer is to begin inside a reasoning block, and what
/// closes the block.
const OPENERS: [(&str, &str); 8] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
];

/// Byte offsets in a render.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Start of what the target writes after the generation prompt.
    pub(crate) answer: usize,
    /// End of what the render shares with the generation prompt, at most `answer`.
    pub(crate) own_context: usize,
}

/// The renders of a turn that an answer is looked for in.
#[derive(Clone, Copy)]
pub(crate) struct Renders<'a> {
    /// The conversation with the answer.
    pub(crate) full: &'a str,
    /// The same with [`with_other_answer`].
    pub(crate) other: &'a str,
    /// The conversation before the answer, with the generation prompt.
    pub(crate) prompt: &'a str,
    /// The text of the last message before the answer.
    pub(crate) asked: &'a str,
}

/// Whether a prompt leaves a reasoning block open that `answer` does not close.
pub(crate) fn lacks_reasoning(prompt: &str, answer: &str) -> bool {
    let opened = OPENERS.iter().find(|(opener, _)| prompt.trim_end().ends_with(opener));
    opened.is_some_and(|(_, closer)| !answer.contains(closer))
}

/// The messages with another text for the last one's answer, without its tool calls.
pub(crate) fn with_other_answer(messages: &[Message]) -> Vec<Message> {
    let mut messages = messages.to_vec();
    if let Some(last) = messages.last_mut() {
        last.content = match last.content {
            Value::Array(_) => json!([{ "type": "text", "text": OTHER }]),
            _ => OTHER.into(),
        };
        last.reasoning_content = last.reasoning_content.is_some().then(|| OTHER.into());
        last.tool_calls = None;
    }
    messages
}

/// Where the answer starts. Its text starts where the two full renders begin to differ. What the
/// template prints between the last message and that text belongs to the answer as well, as far as
/// the prompt does not have it.
///
/// `None` if the render does not depend on the answer.
pub(crate) fn find_answer(renders: Renders<'_>) -> Option<Found> {
    let Renders { full, other, prompt, asked } = renders;
    let text = common(full, other);
    if text == full.len() {
        return None;
    }
    let asked = asked.trim();
    let behind = |render: &str| Some(render.rfind(asked)? + asked.len());
    let places = behind(&full[..text]).zip(behind(prompt)).filter(|_| !asked.is_empty());
    let Some((in_full, in_prompt)) = places else {
        return Some(Found { answer: text, own_context: text });
    };
    let between = &full[in_full..text];
    let own_context = in_full + whole_markers(between, common(between, &prompt[in_prompt..]));
    let rest = &full[own_context..text];
    let ends = rest.char_indices().map(|(at, letter)| at + letter.len_utf8());
    let overlap = ends.rev().find(|&end| prompt.ends_with(&rest[..end])).unwrap_or(0);
    Some(Found { answer: own_context + overlap, own_context })
}

/// Bytes that both texts begin with.
fn common(one: &str, other: &str) -> usize {
    let pairs = one.chars().zip(other.chars()).take_while(|(a, b)| a == b);
    pairs.map(|(letter, _)| letter.len_utf8()).sum()
}

/// `end`, or the start of the marker, such as `<think>`, that it would cut.
fn whole_markers(text: &str, end: usize) -> usize {
    let open = text[..end].rfind(['<', '[']);
    open.filter(|&open| !text[open..end].contains(['>', ']'])).unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(full: &str, prompt: &str, expect: Option<(&str, &str)>) {
        let other = full.replace('b', OTHER);
        let found = find_answer(Renders { full, other: &other, prompt, asked: " q" });
        let split = found.map(|found| (&full[found.answer..], &full[found.own_context..]));
        assert_eq!(split, expect, "{full}");
    }

    #[test]
    fn an_answer_starts_after_what_the_prompt_has_of_it() {
        // What the template opens before the text is the target's to write.
        check("2<u>q<a>[R]b[E]", "1<u>q<a>", Some(("[R]b[E]", "[R]b[E]")));
        // The prompt opens and closes a block that the render lacks, or has in another form.
        check("2<u>q<a>b", "1<u>q<a><t></t>", Some(("b", "b")));
        check("2<u>q<a><t2>b", "1<u>q<a><t></t>", Some(("<t2>b", "<t2>b")));
        check("<u>q<a></t>b", "<u>q<a><t>", Some(("</t>b", "</t>b")));
        // The prompt has more between the question and the header.
        check("<u>q<a>b", "<u>q<s>now<a>", Some(("b", "<a>b")));
        check("1qb", "2q", Some(("b", "b")));
        // The question is printed in another form.
        check("1Qb", "2Q", Some(("b", "b")));
        check("1q", "1q", None);
        // Characters, not bytes, are compared.
        assert_eq!(common("q\u{e9}", "q\u{e8}"), 1);
    }

    #[test]
    fn prompts_that_leave_reasoning_open_are_known() {
        let open = "<|im_start|>assistant\n<think>\n";
        assert!(lacks_reasoning(open, "four"));
        assert!(!lacks_reasoning(open, "</think>four"));
        assert!(!lacks_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", "four"));
    }
}
