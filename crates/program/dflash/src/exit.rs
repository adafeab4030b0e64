//! Exit codes, the final error message, and the panic hook.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; also a server that a signal ends, and with --sigterm-is-success a training that SIGTERM stops, once it has saved |
//! | 1 | something the user can mend: input, paths, ports, disk, more memory than there is |
//! | 2 | the command line itself (clap) |
//! | 101 | a bug: a panic somewhere |
//! | 128 + n | ended by signal n before its end: 129 after SIGHUP, 130 after Ctrl-C, 143 after SIGTERM |
//!
//! A training that exits with 128 + n has saved, unless it reports that its time was over; one that
//! could not save exits with 1. One whose other ranks were stopped exits with 143.

use std::io::{self, Write};
use std::panic::PanicHookInfo;

use dflash_io::say;
use dflash_settings::hide_passwords;
use signal_hook::consts::SIGTERM;

use crate::error::Error;
use crate::signals::{OnSignal, Signals};

/// Success.
pub const DONE: i32 = 0;
/// A fault that the user can fix.
pub const FAULT: i32 = 1;
/// A bug; the code that Rust itself uses for a panic.
pub const BUG: i32 = 101;

/// How a command without an error ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It returned; a signal, if one came, cut it short.
    Returned,
    /// It finished its work, regardless of signals.
    Complete,
    /// It was stopped early and left everything in order.
    Stopped,
}

/// Exits with the code for `outcome` and a received signal.
///
/// Prints an error and its causes to stderr. Skips static destructors: libtorch's are slow, and a
/// running worker thread could crash in them.
pub fn finish(outcome: &anyhow::Result<Ending>, signals: &Signals) -> ! {
    if let Err(error) = outcome {
        report(error);
    }
    at_once(code(outcome.as_ref().ok().copied(), signals.received(), signals.on_signal()))
}

/// Reports an error that kept a command from starting, and exits with [`FAULT`].
pub fn fault(error: Error) -> ! {
    report(&error.into());
    at_once(FAULT)
}

/// Prints `error: ` and the chain of causes, one per line, to stderr.
pub fn report(error: &anyhow::Error) {
    let mut text = format!("error: {error}");
    let mut last = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Many messages already quote their cause.
        if !last.contains(&cause) {
            text.push_str(&format!("\n  caused by: {cause}"));
        }
        last = cause;
    }
    // Quoted arguments and answers may contain an address with its password.
    say(hide_passwords(&text, &[]));
}

/// Exits without running static destructors, after removing partially written files and flushing
/// stdout; a failed flush is a fault.
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

/// A panic in any thread ends the process with one short message and [`BUG`], or with [`FAULT`] if
/// `catch_oom_in` recognises an allocator's message in its text.
///
/// A rank that unwinds quietly in a helper thread would leave its peers waiting in a collective.
/// The exception is the rendering of chat templates, where a panic is the template's fault and is
/// caught.
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
            // The result reached nobody: the reader exited early, or the disk is full.
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

/// The exit code of a command that ended as `ending`, or with an error.
fn code(ending: Option<Ending>, signal: Option<i32>, on_signal: OnSignal) -> i32 {
    let ended_by = match (ending, on_signal) {
        (Some(Ending::Complete), _) => None,
        // A scheduler may have signalled only one of several ranks.
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
