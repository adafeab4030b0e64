//! Python and Jinja2 behaviour that chat templates expect and minijinja lacks.
//!
//! Every function here is named after the Python or Jinja2 behaviour that it copies.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Number, Value as Json};

use super::no_content;
use super::slices;

/// An environment with the settings, functions, filters and tests of Transformers.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method);
    environment.set_formatter(|out, state, value| match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Number => {
            out.write_str(&repr(value)).map_err(Error::from)
        }
        _ => minijinja::escape_formatter(out, state, value),
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", str_of);
    environment.add_filter("upper", |value: &Value| str_of(value).to_uppercase());
    environment.add_filter("lower", |value: &Value| str_of(value).to_lowercase());
    environment.add_filter("trim", trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("none", no_content::is_none);
    environment
}

/// Whether `error` comes from [`raise_exception`].
pub(super) fn is_raised(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(|cause| cause.is::<Raised>())
}

/// The cause of an error that a template raised on purpose.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Raised;

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()).with_source(Raised))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot format {format:?}"))
    })?;
    Ok(text)
}

/// `str(value).strip(chars)`: unlike minijinja's, it takes values of any type.
fn trim(value: &Value, chars: Option<String>) -> String {
    let text = str_of(value);
    match chars {
        None => text.trim().to_owned(),
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
    }
}

/// In Jinja2 an undefined value has length 0.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

/// `iter(value)` works in Python on strings and undefined values, but not on None.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Jinja2 requires `len` and `[]`, which strings and dictionaries have too.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Undefined)
}

/// Python's string methods that minijinja-contrib lacks, or implements for bytes instead of
/// characters.
fn unknown_method(
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if method == slices::METHOD {
        return slices::slice(value, args);
    }
    if let Some(text) = value.as_str()
        && let Some(found) = string_method(text, method, args)?
    {
        return Ok(found);
    }
    unknown_method_callback(state, value, method, args)
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let part = || from_args(args).map(|(part,): (&str,)| part);
    let characters_before = |end: usize| text[..end].chars().count() as i64;
    let found = match method {
        "removeprefix" => text.strip_prefix(part()?).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(part()?).unwrap_or(text).into(),
        "partition" => {
            let separator = part()?;
            let halves = text.split_once(separator);
            list(halves.map_or([text, "", ""], |(before, after)| [before, separator, after]))
        }
        "rpartition" => {
            let separator = part()?;
            let halves = text.rsplit_once(separator);
            list(halves.map_or(["", "", text], |(before, after)| [before, separator, after]))
        }
        "find" => text.find(part()?).map_or(-1, characters_before).into(),
        "rfind" => text.rfind(part()?).map_or(-1, characters_before).into(),
        "rsplit" => rsplit(text, args)?,
        _ => return Ok(None),
    };
    Ok(Some(found))
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit): (&str, Option<i64>) = from_args(args)?;
    let most = limit.and_then(|limit| usize::try_from(limit).ok()).map_or(usize::MAX, |n| n + 1);
    let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
    parts.reverse();
    Ok(list(parts))
}

fn list<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
    texts.into_iter().map(Value::from).collect()
}

/// `json.dumps` with Transformers' defaults: no HTML escaping, `ensure_ascii=False`.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let options = JsonOptions::from_kwargs(&kwargs)?;
    kwargs.assert_all_used()?;
    if value.is_undefined() {
        let reason = "an undefined value is not JSON serializable";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    let json = match no_content::is_none(value) {
        true => Json::Null,
        false => serde_json::to_value(value).map_err(|error| {
            Error::new(ErrorKind::BadSerialization, "tojson failed").with_source(error)
        })?,
    };
    Ok(options.dump(&json, 0))
}

struct JsonOptions {
    ensure_ascii: bool,
    indent: Option<String>,
    sort_keys: bool,
    item_separator: String,
    key_separator: String,
}

impl JsonOptions {
    fn from_kwargs(kwargs: &Kwargs) -> Result<Self, Error> {
        let indent: Option<Value> = kwargs.get("indent")?;
        let indent = indent.filter(|value| !value.is_none()).map(|value| match value.as_i64() {
            Some(spaces) => " ".repeat(usize::try_from(spaces).unwrap_or(0)),
            None => value.to_string(),
        });
        let separators: Option<Vec<String>> = kwargs.get("separators")?;
        let [item_separator, key_separator] =
            separators.and_then(|pair| <[String; 2]>::try_from(pair).ok()).unwrap_or_else(|| {
                // Python drops the blank after the comma when a line break follows it.
                [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()]
            });
        Ok(Self {
            ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
            sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            indent,
            item_separator,
            key_separator,
        })
    }

    fn dump(&self, value: &Json, depth: usize) -> String {
        match value {
            Json::Array(items) => {
                let items = items.iter().map(|item| self.dump(item, depth + 1)).collect();
                self.enclose('[', items, ']', depth)
            }
            Json::Object(entries) => {
                let mut entries: Vec<_> = entries.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                let items = entries.into_iter().map(|(key, item)| {
                    self.string(key) + &self.key_separator + &self.dump(item, depth + 1)
                });
                self.enclose('{', items.collect(), '}', depth)
            }
            Json::String(text) => self.string(text),
            Json::Number(number) => number_repr(number),
            Json::Null | Json::Bool(_) => value.to_string(),
        }
    }

    fn enclose(&self, open: char, items: Vec<String>, close: char, depth: usize) -> String {
        let line = |depth| match &self.indent {
            Some(indent) if !items.is_empty() => format!("\n{}", indent.repeat(depth)),
            _ => String::new(),
        };
        let (before_item, before_end) = (line(depth + 1), line(depth));
        let items = items.join(&format!("{}{before_item}", self.item_separator));
        format!("{open}{before_item}{items}{before_end}{close}")
    }

    fn string(&self, text: &str) -> String {
        let quoted = Json::from(text).to_string();
        if !self.ensure_ascii {
            return quoted;
        }
        let escape = |unit: u16| match u8::try_from(unit) {
            Ok(byte @ b' '..=b'~') => char::from(byte).to_string(),
            _ => format!("\\u{unit:04x}"),
        };
        quoted.encode_utf16().map(escape).collect()
    }
}

/// `repr` of an int or float.
fn number_repr(number: &Number) -> String {
    match number.as_f64() {
        Some(value) if number.is_f64() => float_repr(value),
        _ => number.to_string(),
    }
}

/// Rust switches to exponents at the same magnitudes as Python, but writes `1e-5` for `1e-05` and
/// `NaN` for `nan`.
fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    let text = format!("{value:?}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{}e{sign}{digits:0>2}", mantissa.strip_suffix(".0").unwrap_or(mantissa))
}

fn str_of(value: &Value) -> String {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Number => repr(value),
        _ => value.to_string(),
    }
}

/// `repr(value)`, for numbers, lists and dictionaries that a template prints directly.
fn repr(value: &Value) -> String {
    let items = value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Seq => {
            let items: Vec<String> = items.map(|item| repr(&item)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let item = |key: &Value| value.get_item(key).unwrap_or_default();
            let items: Vec<String> =
                items.map(|key| format!("{}: {}", repr(&key), repr(&item(&key)))).collect();
            format!("{{{}}}", items.join(", "))
        }
        ValueKind::String => string_repr(value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float_repr)
        }
        _ => value.to_string(),
    }
}

/// Python prefers single quotes, and double ones when only single ones occur inside.
fn string_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let escape = |c: char| match c {
        '\\' | '\n' | '\r' | '\t' => c.escape_default().to_string(),
        c if c == quote => format!("\\{c}"),
        c if c.is_ascii_control() => format!("\\x{:02x}", u32::from(c)),
        c => c.to_string(),
    };
    format!("{quote}{}{quote}", text.chars().map(escape).collect::<String>())
}

/// Turns `{% generation %}` (Transformers' marker for the model's text) into a block that minijinja
/// supports and that, like Jinja2's, has its own scope.
pub(super) fn replace_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + length];
        out.push_str(&rest[..start + 2]);
        match tag.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[start + length..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, expect: &str) {
        let value: serde_json::Value = serde_json::from_str(
            r#"{"f": [1.0, 1e16, 1e-5, 1.5e-7, 0.1, 100], "s": "é\"\\\n\u0001", "n": null, "e": {}}"#,
        )
        .unwrap();
        let context = minijinja::context! { v => value };
        let replaced = slices::replace_slices(source);
        assert_eq!(environment().render_str(&replaced, context).unwrap(), expect, "{source}");
    }

    // The expectations are what Python 3.12's json.dumps, str and Jinja2 3.1 print.
    #[test]
    fn tojson_prints_what_json_dumps_prints() {
        check("{{ v.f | tojson }}", "[1.0, 1e+16, 1e-05, 1.5e-07, 0.1, 100]");
        check("{{ v.s | tojson }}", r#""é\"\\\n\u0001""#);
        check("{{ v.s | tojson(ensure_ascii=true) }}", r#""\u00e9\"\\\n\u0001""#);
        check("{{ '\u{7f}' | tojson }}", "\"\u{7f}\"");
        check("{{ ' ~\u{7f}\u{80}' | tojson(ensure_ascii=true) }}", r#"" ~\u007f\u0080""#);
        check("{{ [v.n, v.e, true, '<'] | tojson }}", r#"[null, {}, true, "<"]"#);
        check(
            "{{ {'b': 1, 'a': [1, 2]} | tojson(indent=2) }}",
            "{\n  \"b\": 1,\n  \"a\": [\n    1,\n    2\n  ]\n}",
        );
        check("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", r#"{"a": 2, "b": 1}"#);
        check("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]");
    }

    #[test]
    fn printing_follows_python() {
        check("{{ ['a', none, true, 1.0] }}", "['a', None, True, 1.0]");
        check("{{ {'k': \"it's\"} }}", "{'k': \"it's\"}");
        check("{{ {'k': 'a\n'} | string }}", r"{'k': 'a\n'}");
        check("{{ 'a' ~ none ~ true }}", "aNoneTrue");
        check("{{ [' a'] | trim }}{{ '-a-' | trim('-') }}{{ ['a'] | upper }}", "[' a']a['A']");
    }

    #[test]
    fn string_methods_follow_python() {
        check("{{ 'x:y:z'.partition(':') }}", "['x', ':', 'y:z']");
        check("{{ 'xyz'.partition(':') }}", "['xyz', '', '']");
        check("{{ 'xyz'.rpartition(':') }}", "['', '', 'xyz']");
        check("{{ 'x:y:z'.rpartition(':') }}", "['x:y', ':', 'z']");
        check("{{ 'a.b.c'.rsplit('.', 1) }}", "['a.b', 'c']");
        check("{{ 'éa'.find('a') }}{{ 'éa'.rfind('b') }}", "1-1");
        check("{{ 'abc'.removeprefix('a').removesuffix('c') }}", "b");
        check("{{ 'a</think>b'.split('</think>')[-1].lstrip('\n') }}", "b");
        check("{{ 'abc'[::-1] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[1] }}", "cba[3, 2, 1]b");
    }

    #[test]
    fn jinja2_kinds_and_undefined_values() {
        check("{{ 'a' is sequence }}{{ {} is iterable }}{{ none is iterable }}", "TrueTrueFalse");
        check("{{ missing | length }}{{ missing is defined }}", "0False");
        check("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2");
    }

    #[test]
    fn the_clock_is_formatted() {
        let year = environment().render_str("{{ strftime_now('%Y') }}", ()).unwrap();
        assert!(year.len() == 4 && year.as_str() >= "2024", "{year}");
        let error = environment().render_str("{{ strftime_now('%!') }}", ()).unwrap_err();
        assert!(error.to_string().contains("cannot format"), "{error}");
    }

    #[test]
    fn lists_have_pythons_methods_and_slices() {
        check("{{ [1, 2, 1].count(1) }}{{ 'a,b'.split(',') | length }}", "22");
        check("{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.get('b') }}", "2None");
        check("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2");
        check("{{ [1, 2, 3][-1] }}{{ [1, 2, 3][1:] }}{{ 'é€a'[:2] }}", "3[2, 3]é€");
        check("{{ ''[::-1] }}{{ [][::-1] }}{{ 'abcdefgh'[5:2] }}{{ [1, 2][5:2:-1] }}", "[][]");
        check("{{ [1, 2, 3][:0:-1] }}{{ 'abc'[-9::-1] }}{{ ([1, 2][2:])[::-1] }}", "[3, 2][]");
        check("{% for i in [[1]][::-1] %}{{ i[::-1][0] }}{% endfor %}", "1");
        check("{{ 'x' in 'xy' }}{{ 'k' in {'k': 1} }}{{ 4 in [1] }}", "TrueTrueFalse");
    }

    #[test]
    fn numbers_print_as_in_python() {
        check("{{ 1 }} {{ 1.0 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 7 % 4 }}", "1 1.0 3 3.5 3");
        check(
            "{{ 1e16 }} {{ 1e15 }} {{ 1e22 }} {{ 1e-5 }}",
            "1e+16 1000000000000000.0 1e+22 1e-05",
        );
        check("{{ 1.5e300 }} {{ 0.0001 }} {{ -1e-7 }}", "1.5e+300 0.0001 -1e-07");
        check(
            "{{ v.f[1] }} {{ 1e16 | string }} {{ [1e16] }} {{ 12345678901 }}",
            "1e+16 1e+16 [1e+16] 12345678901",
        );
        let texts = [1e15, 1e22, -2.5e-10, 1e-4].map(float_repr);
        assert_eq!(texts, ["1000000000000000.0", "1e+22", "-2.5e-10", "0.0001"]);
    }

    #[test]
    fn wrong_calls_are_errors_not_panics() {
        for source in [
            "{{ nothing | tojson }}",
            "{{ 4 | length }}",
            "{{ 'a'.nonsense() }}",
            "{{ 'a'.partition() }}",
            "{{ nothing.field }}",
            "{{ [] | tojson(nonsense=1) }}",
            "{{ nothing[1:] }}",
            "{{ none[::-1] }}",
            "{{ 4[1:] }}",
            "{{ 'ab'[::0] }}",
            "{{ 'ab'['a':] }}",
        ] {
            let replaced = slices::replace_slices(source);
            assert!(environment().render_str(&replaced, ()).is_err(), "{source}");
        }
    }

    #[test]
    fn only_generation_tags_are_replaced() {
        let check = |source, expect| assert_eq!(replace_generation_tags(source), expect);
        check("{%- generation -%}", "{%- with -%}");
        check("{% endgeneration %}{% if a %}", "{% endwith %}{% if a %}");
        for kept in ["generation {{ 'generation' }} {% set generation = 1 %}", "{% unclosed"] {
            check(kept, kept);
        }
    }
}
