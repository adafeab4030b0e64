//! Log lines on stderr, as terse as asked for.

use std::io::{self, IsTerminal};

use dflash_io::Stderr;
use tracing_subscriber::EnvFilter;

use crate::cli::GlobalArgs;

/// Sends log lines to stderr. `DFLASH_LOG` (tracing's filter syntax) wins over `-v` and `-q`.
pub fn init(global: GlobalArgs) {
    let filter =
        EnvFilter::try_from_env("DFLASH_LOG").unwrap_or_else(|_| EnvFilter::new(level(global)));
    // The tokenizer's lines at `trace` spell the texts out, and no text goes into a log.
    let filter = filter.add_directive(NO_TEXTS.parse().expect("a directive"));
    // A second initialisation (tests) keeps the first subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .try_init();
}

const NO_TEXTS: &str = "tokenizers=off";

/// Dependencies speak at `warn` only: their `info` is about sockets and headers. The Hub's client
/// logs an error that we report ourselves.
fn level(global: GlobalArgs) -> &'static str {
    match global {
        GlobalArgs { quiet: true, .. } => "error,hf_hub=off",
        GlobalArgs { verbose: 0, .. } => "warn,dflash=info,hf_hub=off",
        GlobalArgs { verbose: 1, .. } => "info,dflash=debug",
        GlobalArgs { .. } => "trace",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbosity_raises_the_level_and_quiet_lowers_it() {
        let level = |verbose, quiet| level(GlobalArgs { verbose, quiet });
        assert_eq!(level(0, true), "error,hf_hub=off");
        assert_eq!(level(0, false), "warn,dflash=info,hf_hub=off");
        assert_eq!(level(1, false), "info,dflash=debug");
        assert_eq!(level(3, false), "trace");
    }
}
