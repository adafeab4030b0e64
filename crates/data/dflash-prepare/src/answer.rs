//! Where an answer stands in a template's render, found by its own text.

use dflash_chat::Message;
use serde_json::{Value, json};

/// A text that no answer begins with: a character for private use.
const OTHER: &str = "\u{f8ff}";

/// What generation prompts end with when the answer is to begin inside a reasoning block.
const OPENERS: [&str; 7] = [
    "<think>",
    "<thinking>",
    "<reasoning>",
    "<seed:think>",
    "[THINK]",
    "<|START_THINKING|>",
    "<|begin_of_thought|>",
];

/// Byte offsets in a render.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Start of what the target writes after the generation prompt.
    pub(crate) answer: usize,
    /// End of what the render shares with the generation prompt, at most `answer`.
    pub(crate) own_context: usize,
}

/// Whether a prompt leaves a reasoning block open.
pub(crate) fn opens_reasoning(prompt: &str) -> bool {
    OPENERS.iter().any(|opener| prompt.trim_end().ends_with(opener))
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

/// Where the answer starts in `render`: at the end of the last generation prompt's `header` in it,
/// or else where `other`, the render with [`with_other_answer`], begins to differ.
///
/// `None` if the render does not depend on the answer.
pub(crate) fn find_answer(render: &str, other: &str, header: Option<&str>) -> Option<Found> {
    let pairs = render.char_indices().zip(other.chars());
    let differs = pairs.take_while(|((_, a), b)| a == b).last();
    let text = differs.map_or(0, |((at, same), _)| at + same.len_utf8());
    if text == render.len() {
        return None;
    }
    let header = header.filter(|header| !header.is_empty());
    if let Some(header) = header
        && let Some(at) = render[..text].rfind(header)
    {
        return Some(Found { answer: at + header.len(), own_context: at + header.len() });
    }
    // The header up to what it opens, such as an empty reasoning block.
    let own_context = header.and_then(|header| end_of_start(&render[..text], header));
    Some(Found { answer: text, own_context: own_context.unwrap_or(text) })
}

/// End of the last place in `text` that holds the longest start of `header`, of half its length or
/// more.
fn end_of_start(text: &str, header: &str) -> Option<usize> {
    let ends = header.char_indices().map(|(at, _)| at).filter(|&at| at >= header.len() / 2);
    let found = |end: usize| text.rfind(&header[..end]).map(|at| at + end);
    ends.filter(|&end| end > 0).rev().find_map(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_starts_after_its_header_or_where_its_text_does() {
        let check =
            |render: &str, other: &str, header: Option<&str>, expect: Option<(&str, &str)>| {
                let found = find_answer(render, other, header);
                let split =
                    found.map(|found| (&render[found.answer..], &render[found.own_context..]));
                assert_eq!(split, expect, "{render}");
            };
        // What the template opens before the text is the target's to write.
        check("2<u>q<a>[R]b[E]", "2<u>q<a>[R]*[E]", Some("<a>"), Some(("[R]b[E]", "[R]b[E]")));
        check("2<u>q<a>b", "2<u>q<a>*", Some("<a><t></t>"), Some(("b", "<a>b")));
        check("2<u>q<as>b", "2<u>q<as>*", Some("<as><t>"), Some(("b", "b")));
        check("1qa", "1q*", None, Some(("a", "a")));
        check("1qa", "1q*", Some(""), Some(("a", "a")));
        // Characters, not bytes, are compared.
        check("q\u{e9}", "q\u{e8}", None, Some(("\u{e9}", "\u{e9}")));
        check("1q", "1q", None, None);
    }

    #[test]
    fn prompts_that_leave_reasoning_open_are_known() {
        assert!(opens_reasoning("<|im_start|>assistant\n<think>\n"));
        assert!(!opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    }
}
