//! Converts TOML values to settings.

use std::any::TypeId;

use clap::{Arg, ArgAction};
use dflash_settings::{ResumeMode, Warmup};
use serde_json::{Map, Number, Value};
use toml::de::{DeInteger, DeValue};

/// A value as the user gave it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Given {
    /// From a run file.
    Written(Value),
    /// From `--set`; its type depends on the flag.
    Typed(String),
}

impl Given {
    /// Parses the value of a `--set`: lists, quoted strings and booleans as in TOML, anything else
    /// as a flag's value.
    pub(super) fn of_text(text: &str) -> Self {
        match DeValue::parse(text).map(|value| json(value.get_ref())) {
            Ok(value @ (Value::Array(_) | Value::String(_) | Value::Bool(_))) => {
                Self::Written(value)
            }
            _ => Self::Typed(text.to_owned()),
        }
    }
}

/// A TOML value as JSON. Dates, which JSON does not have, become null, which TOML does not have.
pub(super) fn json(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Integer(integer) => number(&decimal(integer)).unwrap_or_default(),
        DeValue::Float(float) => number(float.as_str()).unwrap_or_else(|| float.as_str().into()),
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Array(values) => values.iter().map(|value| json(value.get_ref())).collect(),
        DeValue::Table(table) => table
            .iter()
            .map(|(name, value)| (name.get_ref().to_string(), json(value.get_ref())))
            .collect(),
        DeValue::Datetime(_) => Value::Null,
    }
}

/// Converts TOML's hexadecimal and binary integers to decimal, as flags expect.
fn decimal(integer: &DeInteger<'_>) -> String {
    match u64::from_str_radix(integer.as_str(), integer.radix()) {
        Ok(value) => value.to_string(),
        Err(_) => integer.as_str().to_owned(),
    }
}

fn number(text: &str) -> Option<Value> {
    let whole = text.parse::<u64>().map(Value::from);
    whole
        .or_else(|_| text.parse::<i64>().map(Value::from))
        .ok()
        .or_else(|| Number::from_f64(text.parse().ok()?).map(Value::Number))
}

/// The value of `arg` for `given`, or what is wrong with it.
pub(super) fn convert(arg: &Arg, given: &Given) -> Result<Value, String> {
    match given {
        Given::Written(value) => written(arg, value),
        Given::Typed(text) => typed(arg, text),
    }
}

fn written(arg: &Arg, value: &Value) -> Result<Value, String> {
    match value {
        Value::Bool(true) if is_resume(arg) => return Ok(ResumeMode::LATEST.into()),
        Value::Bool(false) if is_resume(arg) => return Ok(Value::Null),
        Value::Number(number) if is_number_or_word(arg) => return Ok(number.to_string().into()),
        _ => {}
    }
    let one = expected(arg);
    let expected = if is_list(arg) { format!("{one} or a list of them") } else { one.to_owned() };
    let fitting = |value: &Value| match kind(value) {
        kind if one.ends_with(kind) => Ok(value.clone()),
        kind => Err(wrong(kind, &expected)),
    };
    match value {
        Value::String(text) if is_table(arg) => table(text),
        Value::String(text) if is_list(arg) && !is_number(arg) => Ok(parts(arg, text)),
        Value::Array(values) if is_list(arg) && !values.is_empty() => {
            values.iter().map(fitting).collect()
        }
        value if is_list(arg) => Ok(vec![fitting(value)?].into()),
        value => fitting(value),
    }
}

fn typed(arg: &Arg, text: &str) -> Result<Value, String> {
    match () {
        () if is_flag(arg) => Err(wrong("a string", "true or false")),
        () if is_table(arg) => table(text),
        () if is_list(arg) => Ok(parts(arg, text)),
        () => Ok(scalar(arg, text)),
    }
}

/// A table written as JSON text.
fn table(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|_| wrong("a string", "a table"))
}

/// A list written as one string.
fn parts(arg: &Arg, text: &str) -> Value {
    match arg.get_value_delimiter() {
        Some(delimiter) => text.split(delimiter).map(|part| scalar(arg, part)).collect(),
        None => vec![scalar(arg, text)].into(),
    }
}

/// What is not a number stays a string, for the error to quote.
fn scalar(arg: &Arg, text: &str) -> Value {
    let number = if is_number(arg) { number(text) } else { None };
    number.unwrap_or_else(|| text.into())
}

fn expected(arg: &Arg) -> &'static str {
    match () {
        () if is_flag(arg) => "true or false",
        () if is_table(arg) => "a table",
        () if is_number(arg) => "a number",
        () if is_number_or_word(arg) => "a number or a string",
        () => "a string",
    }
}

fn wrong(kind: &str, expected: &str) -> String {
    format!("is {kind}, but {expected} is needed")
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "a table",
        Value::Null => "a date",
    }
}

/// Why a value of the right type is invalid.
pub(super) fn refusal(arg: &Arg, given: &Given, error: &serde_json::Error) -> String {
    let names: Vec<_> =
        arg.get_possible_values().iter().map(|choice| choice.get_name().to_owned()).collect();
    let reason = match names.is_empty() {
        true => error.to_string(),
        false => format!("possible values: {}", names.join(", ")),
    };
    format!("is refused: invalid value '{}' for '{arg}': {reason}", text(given))
}

fn text(given: &Given) -> String {
    fn plain(value: &Value) -> String {
        match value {
            Value::String(text) => text.clone(),
            Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(","),
            value => value.to_string(),
        }
    }
    match given {
        Given::Written(value) => plain(value),
        Given::Typed(text) => text.clone(),
    }
}

/// Whether the flag's value is an object.
fn is_table(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<Map<String, Value>>()
}

fn is_resume(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<ResumeMode>()
}

/// Whether the flag's value is a string that may be a number.
fn is_number_or_word(arg: &Arg) -> bool {
    is_resume(arg) || arg.get_value_parser().type_id() == TypeId::of::<Warmup>()
}

/// Whether the flag takes no value.
fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// Whether the flag takes several values.
fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append) || arg.get_value_delimiter().is_some()
}

/// Whether the flag's values are numbers, judged by their parsed type.
fn is_number(arg: &Arg) -> bool {
    let numbers = [
        TypeId::of::<f64>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
        TypeId::of::<u32>(),
        TypeId::of::<i64>(),
        TypeId::of::<u16>(),
        TypeId::of::<u8>(),
    ];
    numbers.iter().any(|number| arg.get_value_parser().type_id() == *number)
}
