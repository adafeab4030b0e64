//! Starts the built programs.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

/// The front program built by `make build`.
pub(crate) fn path() -> PathBuf {
    // This test is target/release/deps/workspace-HASH.
    let here = std::env::current_exe().expect("this test's own path");
    let built = here.ancestors().nth(2).expect("deps/ lies in the profile's folder").join("dflash");
    assert!(built.is_file(), "{} is missing; run `make build` first", built.display());
    built
}

/// Result of a finished program.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Exit code; `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error.
    pub(crate) stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

impl Finished {
    /// Asserts an orderly failure: exit code 1, one `error:` line, no trace of a panic.
    pub(crate) fn fault(&self) -> &str {
        assert_eq!(self.code, Some(1), "{self:?}");
        assert!(self.stderr.contains("error: "), "{self:?}");
        for trace in ["panicked", "backtrace", "internal error", "libtorch_cpu.so: "] {
            assert!(!self.stderr.contains(trace), "{self:?}");
        }
        &self.stderr
    }

    /// Asserts success.
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }
}

/// Runs `dflash` with `args` (split at spaces) to its end.
pub(crate) fn dflash(args: &str) -> Finished {
    run(Command::new(path()).args(args.split_whitespace()))
}

/// Runs a command to its end. A freshly copied program is busy while a process that another test is
/// just starting still holds the copy open.
pub(crate) fn run(command: &mut Command) -> Finished {
    loop {
        match command.output() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(Duration::from_millis(10));
            }
            output => return output.expect("the program starts").into(),
        }
    }
}
