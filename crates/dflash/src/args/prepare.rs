//! The flags of `dflash prepare`.

use std::path::PathBuf;

use clap::Args;

/// Turn conversations into a tokenized, masked dataset.
///
/// Renders every conversation with the target's own chat template, marks what the assistant says
/// as supervised, and writes a dataset that `dflash train`, speculators and
/// `datasets.load_from_disk` read. Rows may be ShareGPT (conversations), OpenAI (messages),
/// question/answer, instruction/input/output, prompt/completion, or pre-tokenized
/// (input_ids/loss_mask).
#[derive(Debug, Clone, Args)]
pub struct PrepareArgs {
    /// The target model: a Hugging Face model directory, or its name on the Hub. Only the
    /// tokenizer and the chat template are used [default: Qwen/Qwen3-8B].
    #[arg(long, value_name = "DIR|NAME")]
    pub model: Option<String>,
    /// A .jsonl, .json or .parquet file, a directory of them, a preset (sharegpt, ultrachat,
    /// gsm8k, magpie, open-perfectblend, nemotron, codealpaca), or
    /// hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT. May be given several times.
    #[arg(long, value_name = "FILE|PRESET", required = true, num_args = 1..)]
    pub data: Vec<String>,
    /// Directory of the new dataset [default: output/dflash_MODEL_DATA].
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Longest row in tokens; longer ones are cut.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192)]
    pub seq_length: usize,
    /// Take so many input rows, over all --data together.
    #[arg(long, value_name = "ROWS", alias = "max-samples")]
    pub limit: Option<usize>,
    /// Shuffle the input rows with this seed; with --limit, draw them at random. Keeps the drawn
    /// rows in memory. (Training shuffles every epoch anyway.)
    #[arg(long, value_name = "SEED")]
    pub shuffle_seed: Option<u64>,
    /// Threads that render and tokenize [default: all cores]. The result does not depend on it.
    #[arg(long, value_name = "N", visible_alias = "num-proc", alias = "num-preprocessing-workers")]
    pub workers: Option<usize>,
    /// Drop rows with fewer supervised tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 1)]
    pub minimum_valid_tokens: usize,
    /// Start a new shard at this size.
    #[arg(long, value_name = "MB", default_value_t = 500)]
    pub shard_mb: u64,
    /// Replace the dataset at --output.
    #[arg(long)]
    pub overwrite: bool,
    /// Drop and count rows that are broken, instead of stopping at the first one.
    #[arg(long)]
    pub skip_bad_rows: bool,
    /// Variables for the chat template as a JSON object, such as '{"enable_thinking": false}'.
    #[arg(long, value_name = "JSON", value_parser = json_object)]
    pub chat_template_kwargs: Option<serde_json::Map<String, serde_json::Value>>,
}

fn json_object(text: &str) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: PrepareArgs,
    }

    fn parse(line: &str) -> Result<PrepareArgs, String> {
        Command::try_parse_from(line.split(' '))
            .map(|command| command.args)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_short_line_parses() {
        let args = parse("prepare --data sharegpt --seq-length 8192").unwrap();
        assert_eq!(args.model, None);
        assert_eq!(args.data, ["sharegpt"]);
        assert_eq!((args.output, args.seq_length), (None, 8192));
    }

    #[test]
    fn several_sources_and_aliases_parse() {
        let args = parse("prepare --data a b --data c --num-proc 3 --max-samples 7").unwrap();
        assert_eq!(args.data, ["a", "b", "c"]);
        assert_eq!((args.workers, args.limit), (Some(3), Some(7)));
        let error = parse("prepare --data a --chat-template-kwargs [1]").unwrap_err();
        assert!(error.contains("not a JSON object"), "{error}");
        assert!(parse("prepare").unwrap_err().contains("--data"));
    }
}
