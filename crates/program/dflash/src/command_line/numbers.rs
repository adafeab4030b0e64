//! Numbers that do not fit a flag's type, such as -1 for a count. clap only rejects the digits;
//! this adds the range that the setting's own check allows.

use std::ffi::OsString;

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::{Refusal, parse_typed, usage_error};
use crate::cli::definition;

/// Largest values of the flags' integer types.
const LARGEST: [u64; 3] = [u64::MAX, 65_535, 255];

/// Adds the flag's range to `refusal` of `args` if a number is negative or too large.
pub(super) fn explain(args: &[OsString], refusal: Refusal) -> Refusal {
    let explained = match &refusal {
        Refusal::Usage(error) => with_range(args, error),
        Refusal::Fault(_) => None,
    };
    explained.unwrap_or(refusal)
}

/// Checks the nearest number that fits the type, and rewords the message for the given one.
fn with_range(args: &[OsString], error: &Error) -> Option<Refusal> {
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
    let value = text(error, ContextKind::InvalidValue)?;
    let number: f64 = value.parse().ok().filter(|number: &f64| number.fract() == 0.0)?;
    let nearest: &[u64] = if number < 0.0 { &[0] } else { &LARGEST };
    nearest.iter().find_map(|nearest| match parse_typed(&replaced(args, value, *nearest)) {
        Err(Refusal::Fault(crate::Error::Invalid { place, mut invalid })) => {
            let rest = invalid.reason.strip_prefix(&format!("is {nearest},"))?;
            invalid.reason = format!("is {value},{rest}");
            Some(Refusal::Fault(crate::Error::Invalid { place, invalid }))
        }
        Ok(_) if number < 0.0 => {
            let flag = text(error, ContextKind::InvalidArg)?;
            let message = format!("{flag} is {value}, but it must be a whole number from 0");
            Some(usage_error(command(args), ErrorKind::ValueValidation, &message))
        }
        _ => None,
    })
}

pub(super) fn text(error: &Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text),
        _ => None,
    }
}

pub(super) fn command(args: &[OsString]) -> &str {
    let definition = definition();
    let names = args.iter().filter_map(|arg| arg.to_str());
    names.into_iter().find(|name| definition.find_subcommand(name).is_some()).unwrap_or_default()
}

fn replaced(args: &[OsString], value: &str, number: u64) -> Vec<OsString> {
    let with = |arg: &OsString| match arg.to_str() {
        Some(text) if text == value => number.to_string().into(),
        Some(text) => match text.strip_suffix(value) {
            Some(flag) if flag.ends_with('=') => format!("{flag}{number}").into(),
            _ => arg.clone(),
        },
        None => arg.clone(),
    };
    args.iter().map(with).collect()
}

#[cfg(test)]
mod tests {
    use crate::command_line::{Refusal, parse};

    fn refusal(line: &str) -> String {
        match parse(format!("dflash {line}").split_whitespace().map(Into::into).collect()) {
            Ok(_) => panic!("{line} was taken"),
            Err(Refusal::Usage(error)) => error.to_string(),
            Err(Refusal::Fault(error)) => error.to_string(),
        }
    }

    #[test]
    fn what_a_type_cannot_hold_is_refused_with_the_range() {
        let train = "train --target t --data-path d --save-path s";
        let check = |more: &str, expect: &str| {
            let said = refusal(&format!("{train} {more}"));
            assert!(said.contains(expect), "{more}: {said}");
        };
        check("--max-in-flight -1", "--max-in-flight is -1, but it must be at least 1 and at most");
        check("--max_steps=-3", "--max-steps is -3, but it must be at least 1 and at most");
        let huge = "99999999999999999999999";
        check(&format!("--nproc {huge}"), &format!("--nproc is {huge}, but it must be at least 1"));
        check("--zero 300", "--zero is 300, but the stages are 0 and 1");
        check("--seed -1", "--seed <N> is -1, but it must be a whole number from 0");
        check("--max-steps 1.5", "--max-steps <N>");
        assert!(refusal("hidden-server m --port 70000").contains("0..=65535"));
        let batch = refusal("regenerate --target t --data d --output o --batch -1");
        assert!(batch.contains("--batch is -1, but it must be at least 1 and at most"), "{batch}");
    }

    #[test]
    fn the_same_number_elsewhere_is_left_alone() {
        let line = "train --target -7 --data-path d --save-path s --epochs -7";
        assert!(refusal(line).contains("--epochs is -7, but it must be at least 1"));
    }
}
