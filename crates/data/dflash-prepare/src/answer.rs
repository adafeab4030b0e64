//! Where an answer stands in a template's render, found by its own text.

use dflash_chat::Message;
use serde_json::{Value, json};

/// Texts in the place of an answer, of which one begins as no answer does: characters for private
/// use, of which the first is Apple's logo on its machines.
const OTHERS: [&str; 2] = ["\u{f8ff}", "\u{f8fe}"];

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
    /// The same without the generation prompt, if the template renders it.
    pub(crate) before: Option<&'a str>,
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
        let begins = |other: &str| {
            let reasoning = last.reasoning_content.as_deref().unwrap_or_default();
            [text_of(&last.content), reasoning].iter().any(|text| text.trim().starts_with(other))
        };
        let other = if begins(OTHERS[0]) { OTHERS[1] } else { OTHERS[0] };
        last.content = match last.content {
            Value::Array(_) => json!([{ "type": "text", "text": other }]),
            _ => other.into(),
        };
        last.reasoning_content = last.reasoning_content.is_some().then(|| other.into());
        last.tool_calls = None;
    }
    messages
}

/// The first text of a message's content that is not blank.
pub(crate) fn text_of(content: &Value) -> &str {
    let texts = content.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str());
    let mut texts = content.as_str().into_iter().chain(texts).map(str::trim);
    texts.find(|text| !text.is_empty()).unwrap_or_default()
}

/// Where the answer starts. Its text starts where the two full renders begin to differ. What the
/// template prints between the header of the answer's turn and that text belongs to the answer as
/// well, as far as the prompt does not have it.
///
/// `None` if the render does not depend on the answer.
pub(crate) fn find_answer(renders: Renders<'_>) -> Option<Found> {
    let Renders { full, other, prompt, .. } = renders;
    let text = common(full, other);
    if text == full.len() {
        return None;
    }
    let (start, header) = renders.header(text).unwrap_or((text, ""));
    let between = &full[start..text];
    let own_context = start + whole_markers(between, common(between, header));
    let rest = &full[own_context..text];
    let ends = rest.char_indices().map(|(at, letter)| at + letter.len_utf8());
    let overlap = ends.rev().find(|&end| prompt.ends_with(&rest[..end])).unwrap_or(0);
    Some(Found { answer: own_context + overlap, own_context })
}

impl<'a> Renders<'a> {
    /// Where the header of the answer's turn starts in the full render, whose answer's text starts at
    /// `text`, and what the prompt has from there on. The header is the generation prompt, or for a
    /// template that always prints one, what both renders end with.
    fn header(&self, text: usize) -> Option<(usize, &'a str)> {
        let Self { full, prompt, before, .. } = *self;
        let header = match prompt.strip_prefix(before?)? {
            "" => {
                let shared = common_end(full, prompt);
                let ending = &prompt[prompt.len() - shared..];
                &ending[ending.find(['<', '['])?..]
            }
            header => header,
        };
        // Enough to know the header by, where its rest is what differs.
        let mut ends = header.char_indices().filter(|(_, letter)| ">]:\n".contains(*letter));
        let anchor = ends.find_map(|(at, _)| (at > 0).then(|| &header[..=at])).unwrap_or(header);
        let start = full[..text].rfind(anchor).filter(|_| anchor.len() > 1)?;
        (start >= self.end_of_question(text)).then_some((start, header))
    }

    /// Where the last message ends in the full render; 0 if it is not found.
    fn end_of_question(&self, text: usize) -> usize {
        let asked = self.asked.trim();
        if asked.is_empty() {
            return 0;
        }
        let tail = self.before.and_then(|before| before.rfind(asked).map(|at| &before[at..]));
        let found =
            |question: &str| self.full[..text].rfind(question).map(|at| at + question.len());
        tail.and_then(found).or_else(|| found(asked)).unwrap_or(0)
    }
}

/// Bytes that both texts end with.
fn common_end(one: &str, other: &str) -> usize {
    let pairs = one.chars().rev().zip(other.chars().rev()).take_while(|(a, b)| a == b);
    pairs.map(|(letter, _)| letter.len_utf8()).sum()
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
    use dflash_chat::Role;

    use super::*;

    fn check(full: &str, prompt: &str, before: &str, expect: Option<(&str, &str)>) {
        let other = full.replace('b', OTHERS[0]);
        let before = Some(before);
        let found = find_answer(Renders { full, other: &other, prompt, before, asked: " q" });
        let split = found.map(|found| (&full[found.answer..], &full[found.own_context..]));
        assert_eq!(split, expect, "{full}");
    }

    #[test]
    fn an_answer_starts_after_what_the_prompt_has_of_it() {
        // What the template opens before the text is the target's to write.
        check("2<u>q<as>[R]b[E]", "1<u>q<as>", "1<u>q", Some(("[R]b[E]", "[R]b[E]")));
        // The prompt opens and closes a block that the render lacks, or has in another form.
        check("2<u>q<as>b", "1<u>q<as><t></t>", "1<u>q", Some(("b", "b")));
        check("2<u>q<as><t2>b", "1<u>q<as><t></t>", "1<u>q", Some(("<t2>b", "<t2>b")));
        check("<u>q<as></t>b", "<u>q<as><t>", "<u>q", Some(("</t>b", "</t>b")));
        // The history is printed differently before the header.
        check("<r>q\n<as>b", "<r>q<as>\n", "<r>q", Some(("b", "b")));
        // The question is not in the render as it was asked, or is part of the header.
        check("<u>Q<as>[R]b", "<u>Q'<as>", "<u>Q'", Some(("[R]b", "[R]b")));
        check("<q>q<e><q>\nb", "<q>q<e><q>\nq\n<t>", "<q>q<e>", Some(("b", "b")));
        // The template always prints a header.
        check(
            "<u>q<as><r>b<as><t></t>",
            "<u>q<as><t></t>",
            "<u>q<as><t></t>",
            Some(("<r>b<as><t></t>", "<r>b<as><t></t>")),
        );
        // There is none.
        check("1qb", "2q", "2q", Some(("b", "b")));
        check("1q", "1q", "1q", None);
        // Characters, not bytes, are compared.
        assert_eq!(common("q\u{e9}", "q\u{e8}"), 1);
    }

    #[test]
    fn another_answer_begins_differently() {
        let answer = |text: &str| with_other_answer(&[Message::text(Role::Assistant, text)]);
        assert_eq!(answer("a")[0].content, OTHERS[0]);
        assert_eq!(answer(" \u{f8ff}.")[0].content, OTHERS[1]);
    }

    #[test]
    fn prompts_that_leave_reasoning_open_are_known() {
        let open = "<|im_start|>assistant\n<think>\n";
        assert!(lacks_reasoning(open, "four"));
        assert!(!lacks_reasoning(open, "</think>four"));
        assert!(!lacks_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", "four"));
    }
}
