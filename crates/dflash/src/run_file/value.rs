//! TOML's values as those of settings.

use std::any::TypeId;

use clap::{Arg, ArgAction};
use serde_json::{Map, Value};
use toml::de::{DeInteger, DeString, DeValue};

/// A value as it was written.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Given {
    Flag(bool),
    Number(String),
    Text(String),
    List(Vec<Given>),
    Table(Vec<(String, Given)>),
    /// As typed after `--set`: what it is depends on the flag.
    Typed(String),
    /// A date.
    Other(&'static str),
}

impl Given {
    pub(super) fn of(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::Boolean(flag) => Self::Flag(*flag),
            DeValue::Integer(number) => Self::Number(decimal(number)),
            DeValue::Float(number) => Self::Number(number.as_str().to_owned()),
            DeValue::String(text) => Self::Text(text.to_string()),
            DeValue::Array(values) => {
                Self::List(values.iter().map(|value| Self::of(value.get_ref())).collect())
            }
            DeValue::Table(table) => {
                let entry =
                    |(name, value): (&toml::Spanned<DeString<'_>>, &toml::Spanned<DeValue<'_>>)| {
                        (name.get_ref().to_string(), Self::of(value.get_ref()))
                    };
                Self::Table(table.iter().map(entry).collect())
            }
            other => Self::Other(other.type_str()),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Flag(_) => "true or false",
            Self::Number(_) => "a number",
            Self::Text(_) | Self::Typed(_) => "a string",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
            Self::Other(kind) => kind,
        }
    }
}

/// A value after `--set`: lists and quoted strings as in TOML, all else as after a flag.
pub(super) fn of_text(text: &str) -> Given {
    match DeValue::parse(text).map(|value| Given::of(value.get_ref())) {
        Ok(value @ (Given::List(_) | Given::Text(_) | Given::Flag(_))) => value,
        _ => Given::Typed(text.to_owned()),
    }
}

/// TOML's hexadecimal and binary numbers as flags know them.
fn decimal(number: &DeInteger<'_>) -> String {
    match u64::from_str_radix(number.as_str(), number.radix()) {
        Ok(value) => value.to_string(),
        Err(_) => number.as_str().to_owned(),
    }
}

/// The value that `arg` has for `given`, or what is wrong with it.
pub(super) fn convert(arg: &Arg, given: &Given) -> Result<Value, String> {
    let wrong = |expected: &str| format!("is {}, but {expected} is needed", given.kind());
    if is_flag(arg) {
        return match given {
            Given::Flag(flag) => Ok((*flag).into()),
            _ => Err(wrong("true or false")),
        };
    }
    if is_table(arg) {
        return match given {
            Given::Table(_) => json(given),
            Given::Typed(text) | Given::Text(text) => {
                serde_json::from_str(text).map_err(|_| wrong("a table"))
            }
            _ => Err(wrong("a table")),
        };
    }
    if !is_list(arg) {
        return scalar(arg, given).ok_or_else(|| wrong(expected(arg)));
    }
    let wrong = || wrong(&format!("{} or a list of them", expected(arg)));
    match given {
        Given::List(values) if !values.is_empty() => values
            .iter()
            .map(|value| match value {
                Given::List(_) => Err("is a list of lists".to_owned()),
                value => scalar(arg, value).ok_or_else(|| {
                    format!(
                        "is {}, but {} or a list of them is needed",
                        value.kind(),
                        expected(arg)
                    )
                }),
            })
            .collect(),
        Given::List(_) => Err(wrong()),
        Given::Typed(text) | Given::Text(text) => match arg.get_value_delimiter() {
            Some(delimiter) => text
                .split(delimiter)
                .map(|part| scalar(arg, &as_given(given, part)).ok_or_else(wrong))
                .collect(),
            None => Ok(vec![scalar(arg, given).ok_or_else(wrong)?].into()),
        },
        _ => Ok(vec![scalar(arg, given).ok_or_else(wrong)?].into()),
    }
}

/// Why a value of the right kind is refused all the same.
pub(super) fn refusal(arg: &Arg, given: &Given, error: &serde_json::Error) -> String {
    let choices = arg.get_possible_values();
    let reason = match choices.is_empty() {
        true => error.to_string(),
        false => {
            let names: Vec<&str> = choices.iter().map(|choice| choice.get_name()).collect();
            format!("possible values: {}", names.join(", "))
        }
    };
    format!("is refused: invalid value '{}' for '{arg}': {reason}", given.text())
}

impl Given {
    fn text(&self) -> String {
        match self {
            Self::Flag(flag) => flag.to_string(),
            Self::Number(text) | Self::Text(text) | Self::Typed(text) => text.clone(),
            Self::List(values) => values.iter().map(Self::text).collect::<Vec<_>>().join(","),
            Self::Table(_) | Self::Other(_) => self.kind().to_owned(),
        }
    }
}

fn expected(arg: &Arg) -> &'static str {
    if is_number(arg) { "a number" } else { "a string" }
}

/// A part of a text is given as the whole is.
fn as_given(whole: &Given, part: &str) -> Given {
    match whole {
        Given::Typed(_) => Given::Typed(part.to_owned()),
        _ => Given::Text(part.to_owned()),
    }
}

fn scalar(arg: &Arg, given: &Given) -> Option<Value> {
    match given {
        // What is not a number stays a text, for the refusal to quote.
        Given::Typed(text) if is_number(arg) => {
            Some(number(text).unwrap_or_else(|| text[..].into()))
        }
        Given::Number(text) if is_number(arg) => number(text),
        Given::Typed(text) => Some(text[..].into()),
        Given::Text(text) if !is_number(arg) => Some(text[..].into()),
        _ => None,
    }
}

fn number(text: &str) -> Option<Value> {
    let whole =
        text.parse::<u64>().map(Value::from).or_else(|_| text.parse::<i64>().map(Value::from));
    whole.ok().or_else(|| serde_json::Number::from_f64(text.parse().ok()?).map(Value::Number))
}

/// A table's content as JSON.
fn json(given: &Given) -> Result<Value, String> {
    Ok(match given {
        Given::Flag(flag) => (*flag).into(),
        Given::Number(text) => number(text).ok_or_else(|| format!("{text} is not a number"))?,
        Given::Text(text) | Given::Typed(text) => text[..].into(),
        Given::List(values) => values.iter().map(json).collect::<Result<_, _>>()?,
        Given::Table(entries) => Value::Object(
            entries
                .iter()
                .map(|(key, value)| Ok((key.clone(), json(value)?)))
                .collect::<Result<Map<_, _>, String>>()?,
        ),
        Given::Other(kind) => return Err(format!("holds {kind}, which JSON does not have")),
    })
}

/// Whether the flag's value is an object.
fn is_table(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<Map<String, Value>>()
}

/// Whether the flag takes no value.
pub(super) fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// Whether the flag takes several values.
pub(super) fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// Whether the flag's values are numbers, by the type that they are parsed to.
pub(super) fn is_number(arg: &Arg) -> bool {
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
