//! Recognises tool calls in an answer's text while it is generated.
//!
//! Text is released once it cannot be part of a call; blanks around calls are dropped. Text that
//! looks like a call but is not stays in the answer unchanged.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::reply::random;
use crate::tool_form::{Opening, Reading, ToolForm};
use crate::tools::Tools;

/// A call made by the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    /// The id that the tool's answer refers to. Mistral's templates accept nine letters and digits.
    id: String,
    name: String,
    /// A JSON object.
    arguments: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    Text(String),
    Call(Call),
}

/// Reads the text of one answer.
#[derive(Debug, Clone)]
pub(crate) struct CallReader {
    form: ToolForm,
    tools: Arc<Tools>,
    /// Not released yet.
    pending: String,
    /// Whether it begins like a call.
    is_call: bool,
    calls: usize,
    /// Whether there was text other than blanks.
    has_text: bool,
}

impl Call {
    fn new(name: String, arguments: &serde_json::Map<String, Value>) -> Self {
        let arguments = serde_json::to_string(arguments).expect("its keys are strings");
        Self { id: format!("{:09x}", random() >> 28), name, arguments }
    }

    /// In the form of a message.
    pub(crate) fn json(&self) -> Value {
        let function = json!({"name": self.name, "arguments": self.arguments});
        json!({"id": self.id, "type": "function", "function": function})
    }

    /// Call number `index` in the form of stream chunks: first its name, then its arguments.
    pub(crate) fn deltas(&self, index: usize) -> [Value; 2] {
        let mut begins = self.json();
        begins["index"] = index.into();
        begins["function"]["arguments"] = "".into();
        [begins, json!({"index": index, "function": {"arguments": self.arguments}})]
    }
}

impl CallReader {
    pub(crate) fn new(form: ToolForm, tools: Arc<Tools>) -> Self {
        let pending = String::new();
        Self { form, tools, pending, is_call: false, calls: 0, has_text: false }
    }

    /// Whether there was a call.
    pub(crate) fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Takes more text; `is_end` marks the last.
    pub(crate) fn push(&mut self, text: &str, is_end: bool) -> Vec<Piece> {
        self.pending += text;
        let mut pieces = Vec::new();
        // A call ends with one of these characters; without one, parsing again is useless.
        if self.is_call && !is_end && !text.contains(['}', ']', '>']) {
            return pieces;
        }
        while !self.pending.is_empty() && self.step(is_end, &mut pieces) {}
        pieces
    }

    /// False once nothing more can be decided.
    fn step(&mut self, is_end: bool, pieces: &mut Vec<Piece>) -> bool {
        let is_over = self.calls > 0 && !self.tools.parallel;
        let is_blank = self.pending.trim().is_empty();
        if is_over && !is_blank {
            self.say(self.pending.len(), pieces);
            return false;
        }
        let (is_start, is_behind) = (!self.has_text, self.calls > 0);
        let opening = match self.is_call {
            // Blanks before a possible call wait until it is decided.
            true => Opening::At(self.call_start(is_start, is_behind)),
            false => self.form.opening(&self.pending, is_start, is_behind),
        };
        match opening {
            Opening::At(at) => {
                let text = self.pending[..at].trim_end().len();
                self.is_call = true;
                if text > 0 && !self.is_between(&self.pending[..text]) {
                    self.say(text, pieces);
                    return true;
                }
                self.read(at, is_end, pieces)
            }
            Opening::NotBefore(_) if is_end => {
                match is_blank && self.calls > 0 {
                    true => self.pending.clear(),
                    false => self.say(self.pending.len(), pieces),
                }
                false
            }
            Opening::NotBefore(at) => {
                let text = self.pending[..at].trim_end().len();
                if text > 0 {
                    self.say(text, pieces);
                }
                false
            }
        }
    }

    /// Whether text consists only of a separator between two calls of Llama.
    fn is_between(&self, text: &str) -> bool {
        self.form == ToolForm::Llama
            && self.calls > 0
            && text.chars().all(|c| c == ';' || c.is_whitespace())
    }

    /// Where the call in `pending` begins.
    fn call_start(&self, is_start: bool, is_behind: bool) -> usize {
        match self.form.opening(&self.pending, is_start, is_behind) {
            Opening::At(at) | Opening::NotBefore(at) => at,
        }
    }

    /// Reads the call that begins at `at`, after blanks.
    fn read(&mut self, at: usize, is_end: bool, pieces: &mut Vec<Piece>) -> bool {
        let reading = self.form.read(&self.pending[at..], is_end, &self.tools);
        match reading {
            Reading::More => return false,
            Reading::Calls(bytes, calls) if self.tools.parallel || calls.len() == 1 => {
                self.pending.drain(..at + bytes);
                self.calls += calls.len();
                let calls = calls.into_iter().map(|(name, args)| Call::new(name, &args));
                pieces.extend(calls.map(Piece::Call));
            }
            Reading::Calls(bytes, _) | Reading::Text(bytes) => self.say(at + bytes, pieces),
        }
        self.is_call = false;
        true
    }

    /// Releases this many bytes as text.
    fn say(&mut self, bytes: usize, pieces: &mut Vec<Piece>) {
        let text: String = self.pending.drain(..bytes).collect();
        self.has_text |= !text.trim().is_empty();
        match pieces.last_mut() {
            Some(Piece::Text(before)) => before.push_str(&text),
            _ => pieces.push(Piece::Text(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::Fields;
    use crate::tools;

    fn some_tools(parallel: bool) -> Arc<Tools> {
        let parameters = json!({"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}}});
        let function = json!({"name": "f", "parameters": parameters});
        let fields = json!({"tools": [{"type": "function", "function": function}],
            "parallel_tool_calls": parallel});
        let mut fields = Fields::parse(fields.to_string().as_bytes(), 0).unwrap();
        Arc::new(tools::read(&mut fields).unwrap().unwrap())
    }

    /// Text and calls, these as `[name arguments]`.
    fn shown(pieces: &[Piece]) -> String {
        let show = |piece: &Piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Call(call) => format!("[{} {}]", call.name, call.arguments),
        };
        pieces.iter().map(show).collect()
    }

    /// Split at every position, at all of them and not at all.
    fn check_of(form: ToolForm, parallel: bool, text: &str, expect: &str) {
        let tools = some_tools(parallel);
        let read = |parts: &[&str]| {
            let mut reader = CallReader::new(form, Arc::clone(&tools));
            let mut pieces: Vec<Piece> = Vec::new();
            for part in parts {
                pieces.extend(reader.push(part, false));
                for piece in &pieces {
                    let Piece::Text(said) = piece else { continue };
                    assert!(!expect.contains("[f ") || !said.contains("<tool"), "{said:?}");
                }
            }
            pieces.extend(reader.push("", true));
            shown(&pieces)
        };
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for &at in &ends {
            assert_eq!(read(&[&text[..at], &text[at..]]), expect, "{form:?} cut at {at}: {text}");
        }
        let letters: Vec<&str> = ends.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        assert_eq!(read(&letters), expect, "{form:?} by letters: {text}");
    }

    fn check(form: ToolForm, text: &str, expect: &str) {
        check_of(form, true, text, expect);
    }

    const CALL: &str = r#"{"name": "f", "arguments": {"city": "Århus", "days": 2}}"#;
    const READ: &str = r#"[f {"city":"Århus","days":2}]"#;

    #[test]
    fn hermes_calls_are_found() {
        let mark = |inner: &str| format!("<tool_call>\n{inner}\n</tool_call>");
        let check = |text: &str, expect: &str| check(ToolForm::Hermes, text, expect);
        check(&mark(CALL), READ);
        check(&format!("Let me look. <b\n\n{}", mark(CALL)), &format!("Let me look. <b{READ}"));
        check(&format!("{}\n{}\n", mark(CALL), mark(CALL)), &format!("{READ}{READ}"));
        check(&format!("{} so", mark(CALL)), &format!("{READ} so"));
        // The end of the answer instead of the closing marker.
        check(&format!("<tool_call>{CALL}"), READ);
        let tricky = r#"{"name": "f", "arguments": {"city": "</tool_call> {"}}"#;
        check(&mark(tricky), r#"[f {"city":"</tool_call> {"}]"#);
        check(&mark(r#"{"name": "f"}"#), "[f {}]");
        check(&mark(r#"{"name": "f", "arguments": "{\"days\": 1}"}"#), r#"[f {"days":1}]"#);
        for plain in
            ["no call", " a <tool_cal", "a\n\n", "<tool", "  ", "x <tool_call", "{\"name\": 1}"]
        {
            check(plain, plain);
        }
        // Text that is not a call is not lost, nor is the text before it.
        for wrong in [
            "{\"name\": \"f\", ",
            "nonsense",
            "{\"name\": 3}",
            "{\"name\":\"f\",\"arguments\":[1]}",
        ] {
            let text = format!("a \n{} b", mark(wrong));
            check(&text, &text);
        }
        let cut = format!("<tool_call>\n{}", &CALL[..30]);
        check(&cut, &cut);
    }

    #[test]
    fn calls_in_tags_are_found() {
        let check = |text: &str, expect: &str| check(ToolForm::Tags, text, expect);
        let call = "<function=f>\n<parameter=city>\nÅrhus\n</parameter>\n<parameter=days>\n2\n\
                    </parameter>\n</function>";
        check(&format!("<tool_call>\n{call}\n</tool_call>"), READ);
        check(&format!("Well.\n{call}"), &format!("Well.{READ}"));
        check(
            &format!("<tool_call>\n{call}\n</tool_call>\n<tool_call>{call}</tool_call>"),
            &format!("{READ}{READ}"),
        );
        // A string that looks like a number stays a string; so does text that is not JSON.
        let odd = call.replace("Århus", "12").replace("\n2\n", "\ntwo\n");
        check(&odd, r#"[f {"city":"12","days":"two"}]"#);
        check("<function=f>\n</function>", "[f {}]");
        let lines = call.replace("Århus", "a\n<b>\n\n</tool_call>");
        let expect = r#"[f {"city":"a\n<b>\n\n</tool_call>","days":2}]"#;
        check(&format!("<tool_call>{lines}</tool_call>"), expect);
        for plain in [
            "a < b",
            "<function",
            "<tool_call>\nnothing\n</tool_call>",
            "<function=f>\n<parameter=a>",
        ] {
            check(plain, plain);
        }
    }

    #[test]
    fn llamas_calls_stand_alone() {
        let check = |text: &str, expect: &str| check(ToolForm::Llama, text, expect);
        let call = CALL.replace("arguments", "parameters");
        check(&call, READ);
        check(&format!("<|python_tag|>{call}"), READ);
        check(&format!("\n\n{call}\n"), READ);
        check(&format!("{call}; {call}"), &format!("{READ}{READ}"));
        // Another tool's call, other JSON, and a call after text.
        for plain in [
            &call.replace("\"f\"", "\"g\""),
            "{\"a\": [1, {}]} and",
            &format!("Sure: {call}"),
            "<|python_tag|>print(1)",
            "<|py",
            "{ not JSON",
            &call[..20],
        ] {
            check(plain, plain);
        }
    }

    #[test]
    fn mistrals_calls_come_in_a_list() {
        let check = |text: &str, expect: &str| check(ToolForm::Mistral, text, expect);
        check(&format!("[TOOL_CALLS][{CALL}]"), READ);
        check(&format!("[TOOL_CALLS] [{CALL}, {CALL}]"), &format!("{READ}{READ}"));
        check(&format!("Now: [TOOL_CALLS][{CALL}]"), &format!("Now:{READ}"));
        for plain in
            ["[TOOL", "[1, 2]", "[TOOL_CALLS][]", "[TOOL_CALLS][{\"a\": 1}] x", "[TOOL_CALLS]f{}"]
        {
            check(plain, plain);
        }
    }

    #[test]
    fn further_calls_stay_text_where_one_is_wanted() {
        let call = format!("<tool_call>{CALL}</tool_call>");
        let check = |form, text: &str, expect: &str| check_of(form, false, text, expect);
        check(ToolForm::Mistral, &format!("[TOOL_CALLS][{CALL}]"), READ);
        let two = format!("[TOOL_CALLS][{CALL}, {CALL}]");
        check(ToolForm::Mistral, &two, &two);
        let tools = some_tools(false);
        let mut reader = CallReader::new(ToolForm::Hermes, tools);
        let pieces = reader.push(&format!("{call}{call}"), true);
        assert_eq!(shown(&pieces), format!("{READ}{call}"));
    }

    #[test]
    fn a_stream_tells_the_name_before_the_arguments() {
        let mut reader = CallReader::new(ToolForm::Hermes, some_tools(true));
        let pieces = reader.push(&format!("<tool_call>{CALL}</tool_call>"), true);
        let [Piece::Call(call)] = pieces.as_slice() else { panic!("{pieces:?}") };
        let [first, second] = call.deltas(3);
        assert_eq!((&first["index"], &first["type"]), (&json!(3), &json!("function")));
        assert_eq!(first["function"], json!({"name": "f", "arguments": ""}));
        assert_eq!(first["id"].as_str().unwrap().len(), 9);
        let arguments = second["function"]["arguments"].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(arguments).unwrap()["days"], 2);
        assert_eq!(second["index"], 3);
    }
}
