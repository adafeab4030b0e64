//! The front matter's YAML, written so that every reader reads every string as a string.

use serde_json::{Map, Value};

/// Words that some reader does not read as strings. A country's and a language's code are among
/// them.
const TAKEN: [&str; 10] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan"];

/// The members of `map` as a YAML document, without its markers.
pub(crate) fn document(map: &Map<String, Value>) -> String {
    let mut text = String::new();
    members(&mut text, "", map);
    text
}

fn members(text: &mut String, indent: &str, map: &Map<String, Value>) {
    for (place, (key, value)) in map.iter().enumerate() {
        // The first member of a list item follows the dash.
        if place > 0 || !text.ends_with("- ") {
            text.push_str(indent);
        }
        text.push_str(&string(key));
        text.push(':');
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                text.push('\n');
                members(text, &format!("{indent}  "), inner);
            }
            Value::Array(items) if !items.is_empty() => {
                text.push('\n');
                items.iter().for_each(|item| entry(text, indent, item));
            }
            value => text.push_str(&format!(" {}\n", scalar(value))),
        }
    }
}

fn entry(text: &mut String, indent: &str, item: &Value) {
    text.push_str(indent);
    text.push_str("- ");
    match item {
        Value::Object(inner) if !inner.is_empty() => members(text, &format!("{indent}  "), inner),
        item => text.push_str(&format!("{}\n", scalar(item))),
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => string(text),
        other => other.to_string(),
    }
}

/// A string, in quotes unless every reader reads it as a string without them.
fn string(text: &str) -> String {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ' ');
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(inner)
        && !text.ends_with(' ')
        && !TAKEN.contains(&text.to_lowercase().as_str());
    if is_plain {
        return text.to_owned();
    }
    let quoted = Value::from(text).to_string();
    // JSON allows characters that YAML calls unprintable.
    let escape = |c: char| match c {
        '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
            format!("\\u{:04x}", c as u32)
        }
        c => c.to_string(),
    };
    quoted.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_and_maps_stand_as_people_write_them() {
        let map = json!({"license": "mit", "language": ["no", "en"], "empty": [], "model-index": [
            {"name": "a", "results": [{"task": {"type": "t"}, "metrics":
                [{"type": "x", "value": 2.5}, {"type": "y y", "value": 3}]}]}]});
        let expected = "license: mit\nlanguage:\n- \"no\"\n- en\nempty: []\nmodel-index:\n- name: a\n  \
            results:\n  - task:\n      type: t\n    metrics:\n    - type: x\n      value: 2.5\n    - \
            type: y y\n      value: 3\n";
        assert_eq!(document(map.as_object().unwrap()), expected);
    }

    #[test]
    fn what_is_not_plain_is_quoted() {
        for text in ["mit", "apache-2.0", "Qwen/Qwen3-8B", "a b"] {
            assert_eq!(string(text), text);
        }
        for text in
            ["", "1.0", "1e5", "-", "a: b", "a #b", "yes", "No", "- a", " a", "a ", "{a}", "é"]
        {
            assert_eq!(string(text), format!("\"{text}\""));
        }
        assert_eq!(string("a\n\"b\"\u{85}"), "\"a\\n\\\"b\\\"\\u0085\"");
    }
}
