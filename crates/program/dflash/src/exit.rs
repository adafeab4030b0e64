//! Exit codes, the last words of a program, and what happens on a panic: all in one place.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; also a server that a signal ends, and with --sigterm-is-success a training that SIGTERM stops, once it has saved |
//! | 1 | something the user can mend: input, paths, ports, disk, more memory than there is |
//! | 2 | the command line itself (clap) |
//! | 101 | a bug: a panic somewhere |
//! | 128 + n | ended by signal n before its end: 129 after SIGHUP, 130 after Ctrl-C, 143 after SIGTERM |
//!
//! A training that a signal stops has saved when it ends with 128 + n, unless it says that its time
//! was over; one that could not save ends with 1. One whose other ranks were stopped ends with 143.

use std::io::{self, Write};
use std::panic::PanicHookInfo;

use dflash_io::say;
use dflash_settings::hide_passwords;
use signal_hook::consts::SIGTERM;

use crate::error::Error;
use crate::signals::{OnSignal, Signals};

/// Everything was done.
pub const DONE: i32 = 0;
/// A fault that the user can mend.
pub const FAULT: i32 = 1;
/// A bug; the code that Rust itself uses for a panic.
pub const BUG: i32 = 101;

/// How a command ended that met no error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It has returned. A signal, if one came, has cut it short.
    Returned,
    /// It has done all that it had to do, whatever signals came.
    Complete,
    /// It was stopped before its end and left all in order.
    Stopped,
}

/// Ends the process with the code that `outcome` and a received signal call for.
///
/// An error goes to stderr with its causes. The exit skips static destructors: libtorch's take
/// long, and a worker thread that still runs could crash in them.
pub fn finish(outcome: &anyhow::Result<Ending>, signals: &Signals) -> ! {
    if let Err(error) = outcome {
        report(error);
    }
    at_once(code(outcome.as_ref().ok().copied(), signals.received(), signals.on_signal()))
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

/// Leaves the process without running static destructors. Standard output is flushed first, whose
/// failure is a fault, and what is half written is removed.
pub fn at_once(mut code: i32) -> ! {
    dflash_io::remove_pending();
    if let Err(error) = io::stdout().flush()
        && code == DONE
    {
        say(format!("error: cannot write to standard output: {error}"));
        code = FAULT;
    }
    signal_hook::low_level::exit(code)
}

/// A panic in any thread ends the process with one short message and [`BUG`], or with [`FAULT`] where
/// `catch_oom_in` finds in its text what an allocator said.
///
/// A rank that unwinds quietly in a helper thread would leave its peers waiting in a collective.
/// Only where a chat template is rendered is a panic the template's fault, and caught.
pub fn install_panic_hook(catch_oom_in: fn(&str) -> Option<String>) {
    std::panic::set_hook(Box::new(move |info| {
        if dflash_prepare::panics_are_caught() {
            return;
        }
        let text = panic_text(info);
        if let Some(reason) = catch_oom_in(&text) {
            say(format!(
                "error: there is not enough memory: {reason}; ask for less at a time (shorter or \
                 fewer rows and prompts, a smaller model), or run it where there is more"
            ));
            at_once(FAULT);
        }
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

/// The code of a command that ended as `ending` says, or with an error.
fn code(ending: Option<Ending>, signal: Option<i32>, on_signal: OnSignal) -> i32 {
    let ended_by = match (ending, on_signal) {
        (Some(Ending::Complete), _) => None,
        // Of several ranks one may have been asked alone: then by a scheduler.
        (Some(Ending::Stopped), _) => Some(signal.unwrap_or(SIGTERM)),
        // Whoever restarts it must know that it could not save.
        (None, OnSignal::Save { .. }) => None,
        (Some(Ending::Returned) | None, _) => signal,
    };
    match ended_by {
        Some(signal) if ending.is_none() || !on_signal.is_success(signal) => 128 + signal,
        _ if ending.is_none() => FAULT,
        _ => DONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_decides_unless_all_is_done_or_it_is_how_the_command_ends() {
        let check = |ending: Option<Ending>, signals: [Option<i32>; 4], on_signal, expected| {
            let codes = signals.map(|signal| code(ending, signal, on_signal));
            assert_eq!(codes, expected, "{ending:?} {on_signal:?}");
        };
        let signals = [None, Some(1), Some(2), Some(15)];
        let returned = Some(Ending::Returned);
        check(returned, signals, OnSignal::Interrupt, [0, 129, 130, 143]);
        check(None, signals, OnSignal::Interrupt, [1, 129, 130, 143]);
        let shutdown = OnSignal::Shutdown { drain: std::time::Duration::ZERO };
        check(returned, signals, shutdown, [0; 4]);
        check(None, signals, shutdown, [1, 129, 130, 143]);
        for (sigterm_is_success, termination) in [(false, 143), (true, 0)] {
            let training = OnSignal::Save { sigterm_is_success };
            check(Some(Ending::Complete), signals, training, [0; 4]);
            let stopped = [termination, 129, 130, termination];
            check(Some(Ending::Stopped), signals, training, stopped);
            check(None, signals, training, [1; 4]);
        }
    }
}
