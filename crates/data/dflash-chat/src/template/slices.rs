//! Python's slices.
//!
//! minijinja's own slices panic on `''[::-1]`, and with negative steps they stop at other indices
//! than Python's. A program that uses minijinja cannot override slicing, but it can define methods:
//! `x[1:n]` becomes `x.__slice__(1, n, none)` before a template is compiled. Likewise `x == none`
//! becomes `x is none`, a test that recognises missing content.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The method that replaces a slice.
pub(super) const METHOD: &str = "__slice__";

/// Replaces the slices in a template's expressions.
pub(super) fn replace_slices(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let is_code = tag.starts_with("{{") || tag.starts_with("{%");
        let length = match tag.as_bytes() {
            [b'{', b'#', ..] => tag.find("#}").map_or(tag.len(), |end| end + 2),
            _ if is_code => tag_length(tag),
            _ => 1,
        };
        let (tag, after) = tag.split_at(length);
        out.push_str(&if is_code { in_tag(tag) } else { tag.to_owned() });
        rest = after;
        if is_raw(tag) {
            let end = rest.find("endraw").unwrap_or(rest.len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out + rest
}

fn is_raw(tag: &str) -> bool {
    let inside = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}"));
    inside.is_some_and(|inside| inside.trim_matches(['-', '+']).trim() == "raw")
}

/// Where the tag at the start of `text` ends: at the first closing marker outside strings and
/// brackets.
fn tag_length(text: &str) -> usize {
    let close = if text.starts_with("{{") { "}}" } else { "%}" };
    let mut depth = 0usize;
    let mut at = 2;
    while let Some(c) = text[at..].chars().next() {
        if depth == 0 && text[at..].starts_with(close) {
            return at + 2;
        }
        match c {
            '\'' | '"' => {
                at += string_length(&text[at..]);
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += c.len_utf8();
    }
    text.len()
}

/// The length of the string literal at the start of `text`, quotes included.
fn string_length(text: &str) -> usize {
    let mut characters = text.char_indices();
    let quote = characters.next().map(|(_, quote)| quote);
    while let Some((at, c)) = characters.next() {
        match c {
            '\\' => drop(characters.next()),
            c if Some(c) == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// An open bracket, and the text since it, split at its own colons.
struct Bracket {
    open: char,
    parts: Vec<String>,
}

impl Bracket {
    fn new(open: char) -> Self {
        Self { open, parts: vec![String::new()] }
    }

    fn push(&mut self, text: &str) {
        if let Some(last) = self.parts.last_mut() {
            last.push_str(text);
        }
    }

    /// The text of a whole bracket. A list has no colons of its own, so a bracket with colons is a
    /// slice.
    fn close(self, close: char) -> String {
        let Self { open, parts } = self;
        if open != '[' || parts.len() == 1 {
            return format!("{open}{}{close}", parts.join(":"));
        }
        let bound = |number: usize| match parts.get(number).map(String::as_str) {
            Some(text) if !text.trim().is_empty() => text,
            _ => "none",
        };
        format!(".{METHOD}({},{},{})", bound(0), bound(1), bound(2))
    }
}

/// A tag with its slices replaced. One whose brackets do not match is left to the parser.
fn in_tag(tag: &str) -> String {
    let mut open = vec![Bracket::new(' ')];
    let mut at = 0;
    while let Some(c) = tag[at..].chars().next() {
        let Some(innermost) = open.last_mut() else { return tag.to_owned() };
        if let Some((length, test)) = none_test(&tag[at..]) {
            innermost.push(test);
            at += length;
            continue;
        }
        let length = if matches!(c, '\'' | '"') { string_length(&tag[at..]) } else { c.len_utf8() };
        let text = &tag[at..at + length];
        at += length;
        match c {
            '(' | '[' | '{' => open.push(Bracket::new(c)),
            ':' if innermost.open == '[' => innermost.parts.push(String::new()),
            ')' | ']' | '}' => {
                let Some(bracket) = open.pop() else { return tag.to_owned() };
                match open.last_mut() {
                    Some(outer) => outer.push(&bracket.close(c)),
                    None => return tag.to_owned(),
                }
            }
            _ => innermost.push(text),
        }
    }
    match <[Bracket; 1]>::try_from(open) {
        Ok([whole]) => whole.parts.concat(),
        Err(_) => tag.to_owned(),
    }
}

/// The test that replaces a comparison with none at the start of `text`, and the comparison's
/// length.
fn none_test(text: &str) -> Option<(usize, &'static str)> {
    let (test, after) = match (text.strip_prefix("=="), text.strip_prefix("!=")) {
        (Some(after), _) => (" is none", after),
        (_, Some(after)) => (" is not none", after),
        _ => return None,
    };
    let name = after.trim_start();
    let after = name.strip_prefix("none").or_else(|| name.strip_prefix("None"))?;
    let goes_on = after.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    (!goes_on).then_some((text.len() - after.len(), test))
}

/// `value[start:stop:step]`.
pub(super) fn slice(value: &Value, args: &[Value]) -> Result<Value, Error> {
    let bound = |number: usize| match args.get(number) {
        Some(value) if !value.is_none() => i64::try_from(value.clone()).map(Some),
        _ => Ok(None),
    };
    let (start, stop, step) = (bound(0)?, bound(1)?, bound(2)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "slice step cannot be zero"));
    }
    match value.kind() {
        ValueKind::String => {
            let characters: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            let kept = indices(start, stop, step, characters.len());
            Ok(kept.map(|index| characters[index]).collect::<String>().into())
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            Ok(indices(start, stop, step, items.len()).map(|index| items[index].clone()).collect())
        }
        kind => {
            let reason = format!("a value of type {kind} cannot be sliced");
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        }
    }
}

/// `range(*slice(start, stop, step).indices(length))`, as CPython's `PySlice_AdjustIndices` has it.
fn indices(
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
    length: usize,
) -> impl Iterator<Item = usize> {
    let length = length as i64;
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |bound: i64| {
        let from_start = if bound < 0 { bound.saturating_add(length) } else { bound };
        from_start.clamp(lowest, highest)
    };
    let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
    let (start, stop) = (start.map_or(first, clamp), stop.map_or(last, clamp));
    let mut next = Some(start);
    std::iter::from_fn(move || {
        let index = next.filter(|&index| if step > 0 { index < stop } else { index > stop })?;
        next = index.checked_add(step);
        usize::try_from(index).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_become_calls_and_nothing_else_changes() {
        let check = |source, expect| assert_eq!(replace_slices(source), expect);
        check("{{ x[1:] }}", "{{ x.__slice__(1,none,none) }}");
        check("{{ x[::-1].y }}", "{{ x.__slice__(none,none,-1).y }}");
        check(
            "{% for m in (x[a[1:2]:])[::-1] %}",
            "{% for m in (x.__slice__(a.__slice__(1,2,none),none,none)).__slice__(none,none,-1) %}",
        );
        check("{{ x[:n - 1 if n else 2] }}", "{{ x.__slice__(none,n - 1 if n else 2,none) }}");
        check("{% if x==None and y != none %}", "{% if x is none and y  is not none %}");
        for kept in [
            "{{ '== none' }} {{ x == nonet }} {{ x == 'none' }} == none",
            "x[1:2] {# y[1:] #} {{ '[1:2]' }} {{ \"]\\\"[:\" }}",
            "{% raw %}{{ x[1:] }}{% endraw %}",
            "{{ {'a': [1, {'b': 2}]}['a'][0] }} {{ f(a={1: 2}) }}",
            "{{ x[1: }} {{ '}}' }}",
            "{{ x[1:",
            "{",
        ] {
            check(kept, kept);
        }
        check("{{ {'a': {}}}} {{ x['}}':2] }}", "{{ {'a': {}}}} {{ x.__slice__('}}',2,none) }}");
    }

    // The expectations are CPython 3.12's.
    #[test]
    fn indices_are_pythons() {
        let check = |(start, stop, step), length, expect: &[usize]| {
            let found: Vec<usize> = indices(start, stop, step, length).collect();
            assert_eq!(found, expect, "[{start:?}:{stop:?}:{step}] of {length}");
        };
        check((None, None, -1), 0, &[]);
        check((None, None, -1), 3, &[2, 1, 0]);
        check((Some(5), Some(2), 1), 9, &[]);
        check((Some(5), Some(2), -1), 9, &[5, 4, 3]);
        check((Some(2), Some(5), -1), 9, &[]);
        check((None, Some(0), -1), 3, &[2, 1]);
        check((Some(-5), None, -1), 3, &[]);
        check((Some(-5), None, 1), 3, &[0, 1, 2]);
        check((Some(9), Some(-9), -2), 4, &[3, 1]);
        check((Some(i64::MIN), Some(i64::MAX), i64::MAX), 2, &[0]);
        check((Some(i64::MAX), Some(i64::MIN), i64::MIN), 2, &[1]);
    }
}
