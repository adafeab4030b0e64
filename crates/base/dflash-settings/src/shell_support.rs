//! The settings of `dflash completions` and `dflash man`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::choices::Shell;

/// Print the completions of a shell.
///
/// Bash: dflash completions bash > ~/.local/share/bash-completion/completions/dflash.
/// Zsh: into a file _dflash of a directory of $fpath. Fish: ~/.config/fish/completions/dflash.fish.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct CompletionsSettings {
    /// The shell.
    #[cfg_attr(feature = "clap", arg(value_enum, value_name = "SHELL"))]
    pub shell: Shell,
}

/// Write the man pages: dflash.1 and one for each command.
///
/// The paths go to standard output. `man -l DIR/dflash-train.1` shows one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ManSettings {
    /// Directory of the pages; made if it is not there.
    #[cfg_attr(feature = "clap", arg(value_name = "DIR"))]
    pub dir: PathBuf,
}
