//! `dflash prepare`: arguments to settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use dflash::args::PrepareArgs;
use dflash_prepare::{Config, DEFAULT_MODEL, default_output, prepare};

/// Runs the command: progress to stderr, the summary to stdout.
pub(crate) fn run(args: PrepareArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let config = settings(args);
    let summary = prepare(&config, stop)?;
    println!("{summary}");
    Ok(())
}

fn settings(args: PrepareArgs) -> Config {
    let PrepareArgs {
        model,
        data,
        output,
        seq_length,
        limit,
        shuffle_seed,
        workers,
        minimum_valid_tokens,
        shard_mb,
        overwrite,
        skip_bad_rows,
        chat_template_kwargs,
    } = args;
    let model = model.unwrap_or_else(|| {
        eprintln!("no --model given: preparing for {DEFAULT_MODEL}");
        DEFAULT_MODEL.to_owned()
    });
    Config {
        output: output.unwrap_or_else(|| default_output(&model, &data)),
        workers: workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from)),
        shard_bytes: shard_mb * 1_000_000,
        template_variables: chat_template_kwargs.unwrap_or_default(),
        model,
        data,
        seq_length,
        minimum_valid_tokens,
        limit,
        shuffle_seed,
        overwrite,
        skip_bad_rows,
    }
}
