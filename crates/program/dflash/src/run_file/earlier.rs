//! Settings of `dflash train` under the names of earlier releases, in flags, `--set` and run files.

use std::ffi::OsString;

use dflash_settings::{EARLIER_NAMES, ResumeMode, present_settings};
use serde_json::Value;

use super::Entry;
use super::value::Given;

/// The commands that take the settings of a training run.
const COMMANDS: [&str; 2] = ["train", "plan"];

/// Gives the entries of one source for `table` their present names, at their places.
pub(super) fn present(table: &str, mut entries: Vec<Entry>) -> Vec<Entry> {
    if table != "train" {
        return entries;
    }
    let mut place = None;
    let present = present_settings(&mut |name| {
        let named = |entry: &Entry| entry.key.replace('-', "_") == name;
        // If `--set` repeats a key, the last one counts.
        let entry = entries.remove(entries.iter().rposition(named)?);
        place.get_or_insert(entry.place);
        Some(match entry.value {
            Given::Written(value) => value,
            Given::Typed(text) => text.into(),
        })
    });
    entries.extend(present.into_iter().zip(place.into_iter().cycle()).map(
        |((key, value), place)| Entry { place, key: key.into(), value: Given::Written(value) },
    ));
    entries
}

/// Renames earlier flags in `args` to the present names.
pub(crate) fn with_present_names(mut args: Vec<OsString>) -> Vec<OsString> {
    let command = args.iter().skip(1).find(|arg| !arg.to_string_lossy().starts_with('-'));
    if !command.is_some_and(|command| COMMANDS.iter().any(|name| command == name)) {
        return args;
    }
    join_resume(&mut args);
    let present = present_settings(&mut |name| {
        let takes_value = EARLIER_NAMES.contains(&(name, true));
        take_flag(&mut args, &format!("--{}", name.replace('_', "-")), takes_value)
    });
    let flag = |(key, value): (&str, Value)| {
        let text = match value {
            Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(","),
            value => text(&value),
        };
        format!("--{}={text}", key.replace('_', "-")).into()
    };
    args.extend(present.into_iter().map(flag).collect::<Vec<OsString>>());
    args
}

/// Joins `--resume` with a following mode, which would otherwise be parsed as a run file.
fn join_resume(args: &mut Vec<OsString>) {
    let is_mode = |text: &str| text == ResumeMode::AUTO || text.parse::<u64>().is_ok();
    let joined = |pair: &[OsString]| pair[0] == "--resume" && pair[1].to_str().is_some_and(is_mode);
    if let Some(at) = args.windows(2).position(joined) {
        let mode = args.remove(at + 1);
        args[at].push("=");
        args[at].push(mode);
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Removes every occurrence of `flag` and its value from `args` and returns the last value, `true`
/// for a flag without one.
fn take_flag(args: &mut Vec<OsString>, flag: &str, takes_value: bool) -> Option<Value> {
    let mut found = None;
    while let Some(at) = args.iter().position(|arg| name_of(arg) == flag) {
        let arg = args.remove(at);
        let arg = arg.to_string_lossy();
        let value = match arg.split_once('=') {
            Some((_, value)) => value.into(),
            None if takes_value && at < args.len() => {
                args.remove(at).to_string_lossy().into_owned().into()
            }
            None if takes_value => "".into(),
            None => Value::Bool(true),
        };
        found = Some(value);
    }
    found
}

fn name_of(arg: &OsString) -> String {
    let text = arg.to_string_lossy();
    text.split('=').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expect: &str) {
        let args = line.split_whitespace().map(Into::into).collect();
        let found: Vec<String> =
            with_present_names(args).iter().map(|arg| arg.to_string_lossy().into()).collect();
        assert_eq!(found.join(" "), expect, "{line}");
    }

    #[test]
    fn flags_of_earlier_releases_are_read_as_the_present_ones() {
        let train = "dflash train --lr 1";
        check(&format!("{train} --resume"), &format!("{train} --resume"));
        check(&format!("{train} --resume auto -q"), &format!("{train} --resume=auto -q"));
        check(&format!("{train} --resume run.toml"), &format!("{train} --resume run.toml"));
        check(&format!("{train} --resume-or-start --resume"), &format!("{train} --resume=auto"));
        check(&format!("{train} --resume --resume-from 7"), &format!("{train} --resume=7"));
        check(&format!("{train} --resume-or-start --resume=7"), &format!("{train} --resume=7"));
        check("dflash train --warmup-steps=5 --lr 1", &format!("{train} --warmup=5"));
        check("dflash train --warmup-ratio 1 --lr 1", &format!("{train} --warmup=1.0"));
        let betas = "dflash train --adam-beta1 0.8 --lr 1 --adam-beta2 0.9";
        check(betas, &format!("{train} --adam-betas=0.8,0.9"));
        check("dflash plan --adam-beta2 0.9", "dflash plan --adam-betas=0.9,0.9");
        check("dflash push --resume-from 7", "dflash push --resume-from 7");
    }
}
