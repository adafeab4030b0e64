//! Passwords in server addresses: used, but never shown or recorded.

use serde::Serialize;
use serde_json::Value;

/// Replaces a user's name and password.
const HIDDEN: &str = "***";

/// An endpoint without the name and password before its host.
pub fn shown_endpoint(endpoint: &str) -> String {
    let start = endpoint.find("://").map_or(0, |at| at + 3);
    // The last one: a password that should have been escaped may contain others.
    match endpoint.rfind('@').filter(|&at| at >= start) {
        Some(at) => format!("{}{HIDDEN}{}", &endpoint[..start], &endpoint[at..]),
        None => endpoint.to_owned(),
    }
}

/// `text` without the passwords of `endpoints`, and of other URLs in it: for arguments and settings
/// that are recorded.
pub fn hide_passwords(text: &str, endpoints: &[String]) -> String {
    let mut text = text.to_owned();
    for endpoint in endpoints.iter().filter(|endpoint| endpoint.contains('@')) {
        text = text.replace(endpoint, &shown_endpoint(endpoint));
    }
    let (mut shown, mut rest) = (String::new(), text.as_str());
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        let end = after.find(['/', '?', '#', ',', '"', '\'', ' ']).unwrap_or(after.len());
        let host = after[..end].rfind('@').map_or(0, |at| at);
        shown.push_str(before);
        shown.push_str(if host > 0 { HIDDEN } else { "" });
        rest = &after[host..];
    }
    shown + rest
}

/// Settings in a form that may be printed, recorded and passed to other programs: a table in which
/// no text contains a password. All code that shows settings uses this.
///
/// # Panics
/// If `settings` cannot be serialized as a table: a bug.
pub fn shown_settings(settings: &impl Serialize) -> Value {
    let mut shown = serde_json::to_value(settings).expect("settings print");
    let endpoints = endpoints_in(&shown);
    hide_passwords_in(&mut shown, &endpoints);
    shown
}

/// The addresses in a table of settings, in any setting whose name ends in `endpoint`: addresses
/// without a scheme cannot be recognised otherwise.
fn endpoints_in(settings: &Value) -> Vec<String> {
    let named = settings.as_object().into_iter().flatten();
    let named = named.filter(|(key, _)| key.ends_with("endpoint")).map(|(_, value)| value);
    let texts = named.flat_map(|value| match value {
        Value::Array(values) => values.as_slice(),
        one => std::slice::from_ref(one),
    });
    texts.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Hides the passwords in every text of `value`; the keys are left as they are.
fn hide_passwords_in(value: &mut Value, endpoints: &[String]) {
    match value {
        Value::String(text) => *text = hide_passwords(text, endpoints),
        Value::Array(values) => {
            values.iter_mut().for_each(|value| hide_passwords_in(value, endpoints));
        }
        Value::Object(map) => {
            map.values_mut().for_each(|value| hide_passwords_in(value, endpoints));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_name_and_password_are_hidden() {
        let check = |endpoint: &str, shown: &str| assert_eq!(shown_endpoint(endpoint), shown);
        check("http://localhost:8000/v1", "http://localhost:8000/v1");
        check("https://me:pass@host:8000/v1", "https://***@host:8000/v1");
        check("me:p@ss/w@host:8000", "***@host:8000");
        check("localhost:8000", "localhost:8000");
    }

    #[test]
    fn shown_settings_hold_no_password_under_any_key() {
        let settings = serde_json::json!({
            "vllm_endpoint": ["http://u:p@h:1/v1", "u:q@h:2"],
            "plain_endpoint": "u:r@h:3",
            "command": ["train", "--endpoint=u:q@h:2", "u:r@h:3", "--lr", "1"],
            "draft": {"from": "https://u:s@h/x"},
            "lr": 0.5,
        });
        let shown = serde_json::json!({
            "vllm_endpoint": ["http://***@h:1/v1", "***@h:2"],
            "plain_endpoint": "***@h:3",
            "command": ["train", "--endpoint=***@h:2", "***@h:3", "--lr", "1"],
            "draft": {"from": "https://***@h/x"},
            "lr": 0.5,
        });
        assert_eq!(shown_settings(&settings), shown);
    }

    #[test]
    fn recorded_texts_hold_no_password() {
        let check = |text: &str, endpoints: &[&str], shown: &str| {
            let endpoints: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
            assert_eq!(hide_passwords(text, &endpoints), shown);
        };
        check("--lr", &[], "--lr");
        check("a://u:p@h/x,b://h2/x@1", &[], "a://***@h/x,b://h2/x@1");
        check("--endpoint=u:p@h:1", &["u:p@h:1"], "--endpoint=***@h:1");
        check("http://u:p@h:1,u:q@h:2", &["http://u:p@h:1", "u:q@h:2"], "http://***@h:1,***@h:2");
        check(
            "train.vllm_endpoint=[\"https://u:p@h\"]",
            &[],
            "train.vllm_endpoint=[\"https://***@h\"]",
        );
    }
}
