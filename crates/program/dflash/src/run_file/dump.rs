//! `--dump-config`: the resolved settings as a run file.

use clap::Arg;
use dflash_settings::shown_settings;
use serde_json::{Map, Value};

use super::values_of;
use crate::cli::{Cli, Command, definition, table_of};
use crate::error::Error;

/// The run file for the settings of `cli`.
///
/// It contains every setting with a value, defaults included, except defaults overridden by a
/// conflicting setting; a comment lists the settings without a value.
pub(crate) fn dump(cli: &Cli) -> Result<String, Error> {
    let definition = definition();
    let mut settled = cli.command.clone();
    match &mut settled {
        Command::Train(settings) => settings.settle(None),
        Command::Plan(settings) => settings.settle(),
        _ => (),
    }
    let tagged = serde_json::to_value(&settled).ok();
    let tag = tagged.as_ref().and_then(|tagged| tagged.as_object()?.keys().next().cloned());
    let name = tag.unwrap_or_default().replace('_', "-");
    let (Some(command), Some(table)) = (definition.find_subcommand(&name), table_of(&name)) else {
        unreachable!("only commands with run files are asked for them");
    };
    let shown = shown_settings(&values_of(&settled)?);
    let Value::Object(values) = shown else { unreachable!("it was a map") };
    let mut text = format!("# Settings of `dflash {name}`, defaults included.\n[{table}]\n");
    let mut absent = Vec::new();
    let mut heading = None;
    for arg in command.get_arguments() {
        let key = arg.get_id().as_str();
        let Some(value) = values.get(key) else { continue };
        if value.is_null() || gives_way(command, arg, &values) {
            absent.push(key);
            continue;
        }
        if arg.get_help_heading() != heading {
            heading = arg.get_help_heading();
            text.push_str(&format!("\n# {}\n", heading.unwrap_or("Run")));
        }
        text.push_str(&format!("{key} = {}\n", toml_of(value)));
    }
    text.push_str(&format!("\n# Without a value: {}\n", absent.join(", ")));
    Ok(text)
}

/// Whether the setting is only a default and a conflicting one was given.
fn gives_way(command: &clap::Command, arg: &Arg, values: &Map<String, Value>) -> bool {
    let has_default = !arg.get_default_values().is_empty();
    let given = |other: &Arg| {
        let id = other.get_id().as_str();
        let conflicts = command.get_arg_conflicts_with(other);
        conflicts.iter().any(|named| named.get_id() == arg.get_id())
            && values
                .get(id)
                .is_some_and(|value| !matches!(value, Value::Null | Value::Bool(false)))
    };
    has_default && command.get_arguments().any(given)
}

/// Prints numbers unchanged: seeds may exceed TOML's range, and the reader takes their digits.
fn toml_of(value: &Value) -> String {
    let entry = |(key, value): (&String, &Value)| {
        format!("{} = {}", toml::Value::from(key.as_str()), toml_of(value))
    };
    match value {
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(number) => toml::Value::Float(number).to_string(),
            None => number.to_string(),
        },
        Value::String(text) => toml::Value::from(text.as_str()).to_string(),
        Value::Array(values) => {
            format!("[{}]", values.iter().map(toml_of).collect::<Vec<_>>().join(", "))
        }
        Value::Object(map) => {
            format!("{{ {} }}", map.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        Value::Bool(_) | Value::Null => value.to_string(),
    }
}
