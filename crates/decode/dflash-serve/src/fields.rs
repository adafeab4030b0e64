//! The fields of a request, taken one by one; any that remain are unknown, and refused.
//!
//! A body with two bytes per value, such as `[0,0,0]`, takes forty times its size as JSON values.
//! So the number of values of a request is bounded, and the ids of prompts, which may be many, are
//! parsed as numbers directly, no more than a prompt may have.

use std::cell::Cell;
use std::fmt;

use serde::Deserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};

use crate::refusal::Refusal;

/// Maximum number of JSON values of a request, without the ids of prompts: 10 MB, or 30,000
/// messages.
const MOST_VALUES: usize = 1 << 17;
/// Maximum number of prompts that are parsed; more than any request may have.
const MOST_PROMPTS: usize = 1 << 10;

/// A request's fields that have not been read yet.
#[derive(Debug)]
pub(crate) struct Fields {
    others: Map<String, Value>,
    prompts: Option<Vec<Prompt>>,
}

/// A prompt as text or as tokens; if there are too many tokens, one more than the maximum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<i64>),
    /// Something else.
    Wrong,
}

impl Fields {
    /// At most `most` ids of a prompt are used.
    pub(crate) fn parse(body: &[u8], most: usize) -> Result<Self, Refusal> {
        let left = Cell::new(MOST_VALUES);
        let mut json = serde_json::Deserializer::from_slice(body);
        let begins = body.iter().find(|byte| !byte.is_ascii_whitespace());
        let fields = json.deserialize_map(FieldsVisitor { left: &left, most }).and_then(|fields| {
            json.end()?;
            Ok(fields)
        });
        match fields {
            Err(error) if error.is_data() && begins != Some(&b'{') => Err(Refusal::NotAnObject),
            fields => Ok(fields?),
        }
    }

    /// The prompts, one or several; an element of another type becomes `Wrong`.
    pub(crate) fn take_prompts(&mut self) -> Option<Vec<Prompt>> {
        self.prompts.take()
    }

    /// The value of `param`; null counts as absent.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        param: &'static str,
    ) -> Result<Option<T>, Refusal> {
        match self.others.shift_remove(param) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value).map(Some).map_err(|error| {
                Refusal::BadField { param: param.into(), reason: format!("is not usable: {error}") }
            }),
        }
    }

    /// A number within a range that `expected` describes.
    pub(crate) fn number(
        &mut self,
        param: &'static str,
        range: std::ops::RangeInclusive<f64>,
    ) -> Result<Option<f64>, Refusal> {
        let number: Option<f64> = self.take(param)?;
        number.map(|number| within(param, number, range)).transpose()
    }

    /// A whole number within a range.
    pub(crate) fn count(
        &mut self,
        param: &'static str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<usize>, Refusal> {
        let count: Option<u64> = self.take(param)?;
        Ok(count.map(|count| within(param, count, range)).transpose()?.map(|count| count as usize))
    }

    /// Ignores fields that clients send and that have no effect here.
    pub(crate) fn pass_over(&mut self, params: &[&str]) {
        params.iter().for_each(|param| drop(self.others.shift_remove(*param)));
    }

    /// Refuses an OpenAI field that is not supported, unless its value requests nothing.
    pub(crate) fn unsupported(
        &mut self,
        param: &'static str,
        instead: &'static str,
    ) -> Result<(), Refusal> {
        let value = self.others.shift_remove(param).unwrap_or_default();
        let asks_for_nothing = match &value {
            Value::Null | Value::Bool(false) => true,
            Value::Number(number) => number.as_f64().is_some_and(|n| n.to_string() == instead),
            Value::Array(items) => items.is_empty(),
            Value::Object(items) if items.is_empty() => true,
            value => serde_json::from_str(instead).is_ok_and(|neutral: Value| neutral == *value),
        };
        if asks_for_nothing { Ok(()) } else { Err(Refusal::Unsupported { param, instead }) }
    }

    /// # Errors
    /// A field that was not read.
    pub(crate) fn end(self) -> Result<(), Refusal> {
        if self.prompts.is_some() {
            return Err(Refusal::Unknown { param: "prompt".into() });
        }
        match self.others.into_iter().next() {
            Some((param, _)) => Err(Refusal::Unknown { param }),
            None => Ok(()),
        }
    }
}

fn within<T: PartialOrd + std::fmt::Display>(
    param: &'static str,
    number: T,
    range: std::ops::RangeInclusive<T>,
) -> Result<T, Refusal> {
    if range.contains(&number) {
        return Ok(number);
    }
    let reason = format!("is {number}, but it must be {} to {}", range.start(), range.end());
    Err(Refusal::BadField { param: param.into(), reason })
}

struct FieldsVisitor<'a> {
    left: &'a Cell<usize>,
    most: usize,
}

impl<'de> Visitor<'de> for FieldsVisitor<'_> {
    type Value = Fields;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let Self { left, most } = self;
        let mut fields = Fields { others: Map::new(), prompts: None };
        while let Some(key) = map.next_key::<String>()? {
            if key == "prompt" {
                fields.prompts = map.next_value_seed(Prompts { most })?;
            } else {
                let value = map.next_value_seed(Bounded { left })?;
                fields.others.insert(key, value);
            }
        }
        Ok(fields)
    }
}

/// Any value, with a bounded number of parts.
#[derive(Clone, Copy)]
struct Bounded<'a> {
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => return Err(D::Error::custom(format!("it has more than {MOST_VALUES} values"))),
        }
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self)?;
            values.insert(key, value);
        }
        Ok(values.into())
    }
}

/// The field `prompt`: a text, ids, or a list of either. Null counts as absent.
struct Prompts {
    most: usize,
}

impl<'de> DeserializeSeed<'de> for Prompts {
    type Value = Option<Vec<Prompt>>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        Ok(match (PromptPartReader { most: self.most, depth: 1 }).deserialize(json)? {
            PromptPart::Null => None,
            PromptPart::Text(text) => Some(vec![Prompt::Text(text)]),
            PromptPart::Ids(ids) => Some(vec![Prompt::Tokens(ids)]),
            PromptPart::List(prompts) => Some(prompts),
            PromptPart::Id(_) | PromptPart::Wrong => Some(vec![Prompt::Wrong]),
        })
    }
}

/// The contents of the field `prompt`, or of a list in it.
enum PromptPart {
    Null,
    Id(i64),
    Text(String),
    Ids(Vec<i64>),
    List(Vec<Prompt>),
    Wrong,
}

/// Reads it; lists may be nested once.
#[derive(Clone, Copy)]
struct PromptPartReader {
    most: usize,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for PromptPartReader {
    type Value = PromptPart;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<PromptPart, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptPartReader {
    type Value = PromptPart;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a string, a list of token ids, or a list of these")
    }

    fn visit_unit<E>(self) -> Result<PromptPart, E> {
        Ok(PromptPart::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<PromptPart, E> {
        Ok(PromptPart::Wrong)
    }

    fn visit_i64<E>(self, id: i64) -> Result<PromptPart, E> {
        Ok(PromptPart::Id(id))
    }

    fn visit_u64<E>(self, id: u64) -> Result<PromptPart, E> {
        Ok(i64::try_from(id).map_or(PromptPart::Wrong, PromptPart::Id))
    }

    fn visit_f64<E>(self, _: f64) -> Result<PromptPart, E> {
        Ok(PromptPart::Wrong)
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptPart, E> {
        Ok(PromptPart::Text(text.into()))
    }

    fn visit_string<E>(self, text: String) -> Result<PromptPart, E> {
        Ok(PromptPart::Text(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PromptPart, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(PromptPart::Wrong)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptPart, A::Error> {
        let (mut ids, mut prompts) = (Vec::new(), Vec::new());
        let mut is_wrong = false;
        let inner = Self { depth: self.depth.saturating_sub(1), ..self };
        while let Some(part) = list.next_element_seed(inner)? {
            match part {
                // One more than the maximum shows that there are too many.
                PromptPart::Id(id) if ids.len() <= self.most => ids.push(id),
                PromptPart::Id(_) => {}
                PromptPart::Text(_) | PromptPart::Ids(_) if prompts.len() > MOST_PROMPTS => {}
                PromptPart::Text(text) if self.depth > 0 => prompts.push(Prompt::Text(text)),
                PromptPart::Ids(ids) if self.depth > 0 => prompts.push(Prompt::Tokens(ids)),
                _ => is_wrong = true,
            }
        }
        Ok(match (ids.is_empty(), prompts.is_empty()) {
            _ if is_wrong => PromptPart::Wrong,
            (_, true) => PromptPart::Ids(ids),
            (true, false) => PromptPart::List(prompts),
            (false, false) => PromptPart::Wrong,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_read_where_they_stand() {
        let check = |prompt: &str, expect: Option<Vec<Prompt>>| {
            let body = format!("{{\"prompt\": {prompt}}}");
            assert_eq!(
                Fields::parse(body.as_bytes(), 3).unwrap().take_prompts(),
                expect,
                "{prompt}"
            );
        };
        let text = |text: &str| Prompt::Text(text.into());
        check("null", None);
        check("\"a\\n\"", Some(vec![text("a\n")]));
        check("[1, -2]", Some(vec![Prompt::Tokens(vec![1, -2])]));
        check("[]", Some(vec![Prompt::Tokens(vec![])]));
        check("[\"a\", [1]]", Some(vec![text("a"), Prompt::Tokens(vec![1])]));
        // If there are too many, only their number matters.
        check("[1, 2, 3, 4, 5, 6]", Some(vec![Prompt::Tokens(vec![1, 2, 3, 4])]));
        for wrong in
            ["1", "1.5", "true", "{\"a\": [1]}", "[1, \"a\"]", "[[[1]]]", "[1.5]", "[null]"]
        {
            check(wrong, Some(vec![Prompt::Wrong]));
        }
    }

    #[test]
    fn a_request_has_a_bounded_number_of_values() {
        let list = |values: usize| format!("{{\"x\": [{}0]}}", "0,".repeat(values - 1));
        assert!(Fields::parse(list(MOST_VALUES - 1).as_bytes(), 1).is_ok());
        let refusal = Fields::parse(list(MOST_VALUES).as_bytes(), 1).unwrap_err().to_string();
        assert!(refusal.contains("more than 131072 values"), "{refusal}");
        for wrong in ["[]", " 1", "\"a\"", "null"] {
            let refusal = Fields::parse(wrong.as_bytes(), 1).unwrap_err();
            assert!(matches!(refusal, Refusal::NotAnObject), "{wrong}: {refusal}");
        }
        for broken in ["{", "{} x", "x", ""] {
            let refusal = Fields::parse(broken.as_bytes(), 1).unwrap_err();
            assert!(matches!(refusal, Refusal::BadJson(_)), "{broken}: {refusal}");
        }
    }
}
