//! docs/flags.md is generated from the definitions: this test compares it, and rewrites it with
//! `DFLASH_WRITE_DOCS=1 cargo test --release --workspace --test flags_page`.

use std::fmt::Write;
use std::path::Path;

use clap::{Arg, ArgAction, Command};
use dflash::cli::definition;

#[test]
fn the_page_of_flags_is_that_of_the_definitions() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/flags.md");
    let page = page();
    if std::env::var_os("DFLASH_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap();
    let line = found.lines().zip(page.lines()).position(|(found, line)| found != line);
    assert!(
        found == page,
        "docs/flags.md differs from the definitions at line {}; rewrite it with \
         DFLASH_WRITE_DOCS=1",
        line.map_or(found.lines().count().min(page.lines().count()), |at| at) + 1
    );
}

fn page() -> String {
    let mut page =
        "# Flags and keys\n\nMade from the definitions in `crates/base/dflash-settings`; a \
        test compares.\n\nA flag `--max-steps` is the key `max_steps` of its command's table in a \
        run file and after\n`--set`. A flag wins over `--set`, that over the environment, that \
        over the run file, and that over\nthe default. Of a flag given twice the last counts, \
        but `--data` and `--set` collect.\n`--max_steps` is read as `--max-steps`. \
        `dflash train -h` shows what people set\nfirst, `--help` all flags. Keys that are seldom \
        set are for run files and `--set`; they are read as flags too.\n"
            .to_owned();
    let mut definition = definition();
    definition.build();
    for command in
        definition.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help")
    {
        command_section(&mut page, "", command);
    }
    page
}

fn command_section(page: &mut String, before: &str, command: &Command) {
    let name = format!("{before}{}", command.get_name());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    write!(page, "\n## dflash {name}\n\n{about}\n").unwrap();
    let general = ["help", "version", "verbose", "quiet"];
    let args = command.get_arguments().filter(|arg| !general.contains(&arg.get_id().as_str()));
    let (rare, args): (Vec<&Arg>, Vec<&Arg>) = args.partition(|arg| arg.is_hide_set());
    let mut sections: Vec<(&str, Vec<&Arg>)> = Vec::new();
    for arg in args {
        let heading = arg.get_help_heading().unwrap_or("flag");
        match sections.iter_mut().find(|(known, _)| *known == heading) {
            Some((_, args)) => args.push(arg),
            None => sections.push((heading, vec![arg])),
        }
    }
    for (heading, args) in sections {
        write!(page, "\n| {heading} | default | |\n|---|---|---|\n").unwrap();
        for arg in args {
            writeln!(page, "| {} | {} | {} |", names(arg), default(arg), help(arg)).unwrap();
        }
    }
    // A plan reads a training's run file.
    if !rare.is_empty() && name != "plan" {
        write!(page, "\n| key for run files and `--set` | default | |\n|---|---|---|\n").unwrap();
        for arg in rare {
            writeln!(page, "| `{}` | {} | {} |", arg.get_id(), default(arg), help(arg)).unwrap();
        }
    }
    for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
        command_section(page, &format!("{name} "), inner);
    }
}

/// `--target DIR`, and its other names.
fn names(arg: &Arg) -> String {
    let takes_value = !matches!(arg.get_action(), ArgAction::SetTrue);
    let names = arg.get_value_names().unwrap_or_default();
    let value = names.first().filter(|_| takes_value).map(|name| name.to_string());
    let Some(long) = arg.get_long() else { return format!("`{}`", value.unwrap_or_default()) };
    let value = match value {
        Some(value) if arg.is_require_equals_set() => format!("[={value}]"),
        value => value.map_or_else(String::new, |value| format!(" {value}")),
    };
    let aliases: Vec<String> = arg
        .get_visible_aliases()
        .unwrap_or_default()
        .iter()
        .map(|alias| format!(", `--{alias}`"))
        .collect();
    format!("`--{long}{value}`{}", aliases.concat()).replace('|', "\\|")
}

fn default(arg: &Arg) -> String {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return "off".to_owned();
    }
    let values: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    match (values.is_empty(), arg.is_required_set()) {
        (false, _) => format!("`{}`", values.join(",")),
        (true, true) => "required".to_owned(),
        (true, false) => String::new(),
    }
}

fn help(arg: &Arg) -> String {
    let text = arg.get_long_help().or(arg.get_help());
    let mut text = text.map(ToString::to_string).unwrap_or_default().replace("\n\n", " ");
    text.truncate(text.trim_end_matches('.').len());
    let choices: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|_| !matches!(arg.get_action(), ArgAction::SetTrue))
        .map(|choice| format!("`{}`", choice.get_name()))
        .collect();
    if !choices.is_empty() {
        text = format!("{}. One of {}", text.trim_end_matches('.'), choices.join(", "));
    }
    if let Some(variable) = arg.get_env() {
        text = format!("{}. Also `{}`", text.trim_end_matches('.'), variable.to_string_lossy());
    }
    text.replace('|', "\\|").replace('\n', " ")
}
