//! The fields of a request, taken one by one: what is left at the end is unknown, and refused.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::refusal::Refusal;

/// A request's fields that have not been read yet.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Refusal> {
        match serde_json::from_slice(body)? {
            Value::Object(fields) => Ok(Self(fields)),
            _ => Err(Refusal::NotAnObject),
        }
    }

    /// The value of `param`; null is as good as none.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        param: &'static str,
    ) -> Result<Option<T>, Refusal> {
        match self.0.shift_remove(param) {
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

    /// Passes over fields that clients send and that change nothing here.
    pub(crate) fn pass_over(&mut self, params: &[&str]) {
        params.iter().for_each(|param| drop(self.0.shift_remove(*param)));
    }

    /// Refuses a field of OpenAI's that has no effect here, unless its value asks for none.
    pub(crate) fn unsupported(
        &mut self,
        (param, instead): (&'static str, &'static str),
    ) -> Result<(), Refusal> {
        let value = self.0.shift_remove(param).unwrap_or_default();
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
    /// A field that nothing has read.
    pub(crate) fn end(self) -> Result<(), Refusal> {
        match self.0.into_iter().next() {
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
