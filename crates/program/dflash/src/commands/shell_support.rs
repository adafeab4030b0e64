//! `dflash completions` and `dflash man`: shell completions and man pages, generated from the
//! command line's definition.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context;
use clap_complete::Generator;
use clap_complete::aot;
use clap_mangen::Man;
use dflash::cli::definition;
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
    definition.set_bin_name("dflash");
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
    let mut text = Vec::new();
    Man::new(command.clone()).title(name.to_uppercase()).render(&mut text)?;
    let path = dir.join(format!("{name}.1"));
    dflash_io::write_bytes(&path, &text)?;
    println!("{}", path.display());
    command
        .get_subcommands()
        .filter(|inner| !inner.is_hide_set())
        .try_for_each(|inner| write_page(dir, &format!("{name}-{}", inner.get_name()), inner))
}
