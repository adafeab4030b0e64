//! TOML's values as the texts that clap takes, and back.

use std::any::TypeId;
use std::ffi::OsString;

use clap::{Arg, ArgAction};
use toml::de::{DeInteger, DeValue};

/// A value as it was written.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Given {
    Flag(bool),
    Number(String),
    Text(String),
    List(Vec<Given>),
    /// As typed after `--set`: what it is depends on the flag.
    Typed(String),
    /// A date or a table.
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
            other => Self::Other(other.type_str()),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Flag(_) => "true or false",
            Self::Number(_) => "a number",
            Self::Text(_) | Self::Typed(_) => "a string",
            Self::List(_) => "a list",
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

/// The texts that `arg` takes for `given`, or what is wrong with it.
pub(super) fn convert(arg: &Arg, given: &Given) -> Result<Vec<OsString>, String> {
    let wrong = |expected: &str| format!("is {}, but {expected} is needed", given.kind());
    if is_flag(arg) {
        return match given {
            Given::Flag(flag) => Ok(vec![flag.to_string().into()]),
            _ => Err(wrong("true or false")),
        };
    }
    let expected = if is_number(arg) { "a number" } else { "a string" };
    match given {
        Given::Typed(text) => Ok(vec![text.into()]),
        Given::Number(text) if is_number(arg) => Ok(vec![text.into()]),
        Given::Text(text) if !is_number(arg) => Ok(vec![text.into()]),
        Given::List(values) if is_list(arg) && !values.is_empty() => {
            let scalar = |value: &Given| match value {
                Given::List(_) => Err("is a list of lists".to_owned()),
                value => convert(arg, value),
            };
            Ok(values.iter().map(scalar).collect::<Result<Vec<_>, _>>()?.concat())
        }
        _ if is_list(arg) => Err(wrong(&format!("{expected} or a list of them"))),
        _ => Err(wrong(expected)),
    }
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
