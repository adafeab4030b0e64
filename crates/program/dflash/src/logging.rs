//! Log lines on stderr.

use std::io::{self, IsTerminal};

use dflash_io::Stderr;
use tracing_subscriber::EnvFilter;

use crate::cli::GlobalArgs;

/// Sends log lines to stderr. `DFLASH_LOG` (tracing's filter syntax) overrides `-v` and `-q`.
pub fn init(global: GlobalArgs) {
    let filter =
        EnvFilter::try_from_env("DFLASH_LOG").unwrap_or_else(|_| EnvFilter::new(level(global)));
    // The tokenizer logs texts at `trace`, and texts must not reach a log.
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

/// Dependencies log at `warn` only, since their `info` is about sockets and headers. The Hub
/// client's own error is dropped: we report it ourselves.
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
