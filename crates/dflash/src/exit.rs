//! Exit codes, the last words of a program, and what happens on a panic: all in one place.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; also a server that a signal ends, and a training that SIGTERM stops, once it has saved |
//! | 1 | something the user can mend: input, paths, ports, disk |
//! | 2 | the command line itself (clap) |
//! | 101 | a bug: a panic somewhere |
//! | 128 + n | ended by signal n: 130 after Ctrl-C, 143 after SIGTERM |

use std::io::{self, Write};
use std::panic::PanicHookInfo;

use dflash_console::say;
use dflash_settings::hide_passwords;

use crate::error::Error;
use crate::signals::{OrdinaryEnd, Signals};

/// Everything was done.
pub const DONE: i32 = 0;
/// A fault that the user can mend.
pub const FAULT: i32 = 1;
/// A bug; the code that Rust itself uses for a panic.
pub const BUG: i32 = 101;

/// Ends the process with the code that `outcome` and a received signal call for.
///
/// An error goes to stderr with its causes. The exit skips static destructors: libtorch's take
/// long, and a worker thread that still runs could crash in them.
pub fn finish(outcome: &anyhow::Result<()>, signals: &Signals, end: OrdinaryEnd) -> ! {
    if let Err(error) = outcome {
        report(error);
    }
    at_once(code(outcome.is_ok(), signals.received(), end))
}

/// Reports an error that kept a command from starting, and leaves with [`FAULT`].
pub fn fault(error: Error) -> ! {
    report(&error.into());
    at_once(FAULT)
}

/// Prints `error: ` and the chain of causes, one a line, to stderr.
pub fn report(error: &anyhow::Error) {
    let mut text = format!("error: {error}");
    let mut last = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Many messages quote their cause already.
        if !last.contains(&cause) {
            text.push_str(&format!("\n  caused by: {cause}"));
        }
        last = cause;
    }
    // Arguments and answers that are quoted may hold an address with its password.
    say(hide_passwords(&text, &[]));
}

/// Leaves the process without running static destructors. Standard output is flushed first, and
/// what is half written is removed.
pub fn at_once(code: i32) -> ! {
    dflash_files::remove_pending();
    let _ = io::stdout().flush();
    signal_hook::low_level::exit(code)
}

/// A panic in any thread ends the process with one short message and [`BUG`].
///
/// A rank that unwinds quietly in a helper thread would leave its peers waiting in a collective.
/// Only where a chat template is rendered is a panic the template's fault, and caught.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        if dflash_prepare::panics_are_caught() {
            return;
        }
        let text = panic_text(info);
        if text.starts_with("failed printing to stdout") {
            // Nobody has the result: a reader that left early, or a full disk.
            say(format!("error: {text}"));
            at_once(FAULT);
        }
        let at = info.location().map(|at| format!(" at {}:{}", at.file(), at.line()));
        say(format!(
            "internal error{}: {text}\n\
             This is a bug in dflash; please report it with the command.",
            at.unwrap_or_default()
        ));
        at_once(BUG);
    }));
}

fn panic_text(info: &PanicHookInfo<'_>) -> String {
    info.payload_as_str().unwrap_or("panic without a message").to_owned()
}

fn code(succeeded: bool, signal: Option<i32>, end: OrdinaryEnd) -> i32 {
    match signal {
        Some(signal) if succeeded && end.is_by(signal) => DONE,
        Some(signal) => 128 + signal,
        None if succeeded => DONE,
        None => FAULT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_decides_unless_it_is_the_ordinary_end() {
        let (never, termination) = (OrdinaryEnd::Never, OrdinaryEnd::Termination);
        assert_eq!(code(true, None, never), 0);
        assert_eq!(code(false, None, never), 1);
        assert_eq!(code(true, Some(2), never), 130);
        assert_eq!(code(true, Some(15), never), 143);
        assert_eq!(code(true, Some(2), termination), 130);
        assert_eq!(code(true, Some(15), termination), 0);
        assert_eq!(code(false, Some(15), termination), 143);
        assert_eq!(code(true, Some(2), OrdinaryEnd::AnySignal), 0);
        assert_eq!(code(false, Some(2), OrdinaryEnd::AnySignal), 130);
    }
}
