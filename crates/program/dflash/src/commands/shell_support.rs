//! `dflash completions` and `dflash man`: shell completions and man pages, generated from the
//! command line's definition.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context;
use clap_complete::Generator;
use clap_complete::aot;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use dflash::cli::definition;
use dflash::name;
use dflash_settings::{CompletionsSettings, ManSettings, Shell};

/// Prints the completions to standard output.
pub(crate) fn completions(settings: &CompletionsSettings) -> anyhow::Result<()> {
    let shell = match settings.shell {
        Shell::Bash => aot::Shell::Bash,
        Shell::Zsh => aot::Shell::Zsh,
        Shell::Fish => aot::Shell::Fish,
        Shell::Elvish => aot::Shell::Elvish,
        Shell::Powershell => aot::Shell::PowerShell,
    };
    let mut definition = definition();
    definition.set_bin_name(name::invoked());
    definition.build();
    shell.try_generate(&definition, &mut io::stdout()).context("cannot write to standard output")
}

/// Writes the pages and prints their paths.
pub(crate) fn man(settings: &ManSettings) -> anyhow::Result<()> {
    let dir = &settings.dir;
    fs::create_dir_all(dir)
        .with_context(|| format!("cannot make the directory {}", dir.display()))?;
    let mut definition = definition();
    definition.build();
    write_page(dir, "dflash", &definition)
}

/// Writes the page of a command and of its subcommands.
fn write_page(dir: &Path, name: &str, command: &clap::Command) -> anyhow::Result<()> {
    let text = page(name, command)?;
    let path = dir.join(format!("{name}.1"));
    dflash_io::write_bytes(&path, &text)?;
    println!("{}", path.display());
    command
        .get_subcommands()
        .filter(|inner| !inner.is_hide_set() && inner.get_name() != "help")
        .try_for_each(|inner| write_page(dir, &format!("{name}-{}", inner.get_name()), inner))
}

/// What a program says by its exit code, as the module `exit` decides it.
const EXIT_STATUS: [(&str, &str); 5] = [
    ("0", "Everything was done, or a server was ended by a signal."),
    ("1", "An error that the user can mend: input, paths, ports, disk, memory."),
    ("2", "A mistake on the command line."),
    ("101", "A bug of the program."),
    ("128 + n", "Ended by signal n: 130 after Ctrl-C, 143 after SIGTERM. A training has saved."),
];

/// Variables that several commands read. Those of a single flag stand beside the flag too.
const ENVIRONMENT: [(&str, &str); 7] = [
    ("DFLASH_LIBTORCH", "The libtorch to use, in place of the one that is searched for."),
    ("DFLASH_LOG", "Filter of the log on stderr, such as debug."),
    ("DFLASH_CPU_LEVEL", "The CPU instruction level."),
    ("HF_HOME, HF_HUB_CACHE", "Where models and datasets of the Hub are kept."),
    ("HF_ENDPOINT", "A mirror of the Hub."),
    ("HF_TOKEN", "The login on the Hub."),
    ("HF_HUB_OFFLINE", "1: use what is kept, and no network."),
];

fn page(name: &str, command: &clap::Command) -> anyhow::Result<Vec<u8>> {
    let examples = command.get_after_help().map(ToString::to_string);
    // clap would print these under EXTRA.
    let bare = command.clone().after_help(clap::builder::Resettable::Reset);
    let mut text = Vec::new();
    Man::new(bare).title(name.to_uppercase()).render(&mut text)?;
    if let Some(examples) = examples {
        let lines = examples.lines().map(|line| line.trim_start_matches("Example: "));
        text.extend(section("EXAMPLES", lines.map(|line| (line, ""))));
    }
    text.extend(section("EXIT STATUS", EXIT_STATUS));
    text.extend(section("ENVIRONMENT", ENVIRONMENT));
    Ok(text)
}

/// A section of terms with what they mean.
fn section<'a>(title: &str, items: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<u8> {
    let mut page = Roff::new();
    page.control("SH", [title]);
    for (term, meaning) in items {
        page.control("TP", []).text([bold(term)]);
        page.text([roman(meaning)]);
    }
    // As part of a page: without the definitions that stand at the head of one.
    page.to_roff().into_bytes()
}
