//! Errors that occur before a command's own library takes over.

use std::io;
use std::path::PathBuf;

use dflash_settings::{CpuLevel, Invalid};

use crate::libtorch::{Flaw, Report, VERSION};

/// An error at start-up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A directory named by the user is not a libtorch that this build can use.
    #[error(
        "{variable}={path} is not usable: {flaw}\n  \
         point {variable} to a libtorch {VERSION} directory (the one that holds lib/), or unset it \
         to let dflash search"
    )]
    WrongLibtorch {
        /// The environment variable.
        variable: &'static str,
        /// Its value.
        path: PathBuf,
        /// What is wrong with the directory.
        flaw: Flaw,
    },
    /// No searched place holds a usable libtorch.
    #[error(
        "this command needs libtorch {VERSION}, and none was found. Looked at:\n{report}\
         To get it: `make setup` in the source tree, or `pip install torch=={VERSION}`, or set \
         DFLASH_LIBTORCH to an unpacked libtorch {VERSION}; `dflash doctor` checks the rest"
    )]
    NoLibtorch {
        /// Every place, with its flaw.
        report: Report,
    },
    /// The CPU instruction level cannot be limited as requested.
    #[error(transparent)]
    CpuLevel(#[from] dflash_cpu::Error),
    /// The engine was started directly, with a level that only the front program can set.
    #[error("--cpu-level {level} takes effect only when `dflash` starts the engine; run `dflash`")]
    StartedAlone {
        /// The requested level.
        level: CpuLevel,
    },
    /// The engine is not next to the front program.
    #[error("{path} is missing; install dflash and dflash-engine side by side (`make build`)")]
    NoEngine {
        /// Where it was expected.
        path: PathBuf,
    },
    /// The run file cannot be read.
    #[error("cannot read the run file {path}{hint}")]
    ReadRunFile {
        /// What the word may have been meant as, if it is not the name of a run file.
        hint: String,
        /// As the user named it.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The run file is not TOML.
    #[error("{place}: {reason}{hint}")]
    RunFileSyntax {
        /// What the file may have been meant as, if its name is not that of a run file.
        hint: String,
        /// File and line.
        place: String,
        /// The parser's error.
        reason: String,
    },
    /// A setting of the run file or of `--set` is invalid.
    #[error("{place}: {key} {reason}")]
    Setting {
        /// File and line, or `--set`.
        place: String,
        /// The key as written.
        key: String,
        /// What is wrong, and what would be valid.
        reason: String,
    },
    /// An invalid setting.
    #[error("{place}{invalid}")]
    Invalid {
        /// Where it was given, followed by a colon; empty if it was typed.
        place: String,
        /// The setting.
        invalid: Invalid,
    },
    /// Flags of vLLM that request something this server does not do.
    #[error(
        "{reason}; the flags after `--` are read as vLLM's, and this one has no counterpart here: remove it (see `dflash hidden-server --help`)"
    )]
    VllmFlags {
        /// The flag, and what is wrong with it.
        reason: String,
    },
    /// The operating system refused to start the engine.
    #[error("cannot start {path}")]
    StartEngine {
        /// The engine.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The program cannot find its own path, and so not its engine.
    #[error("cannot find this program's own path")]
    CurrentExe {
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The signal handlers could not be installed.
    #[error("cannot handle signals such as SIGTERM")]
    Signals {
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
}
