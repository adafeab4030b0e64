//! The flags of `dflash regenerate`.

use std::path::PathBuf;

use clap::Args;

use super::eval::at_least_one;

/// Replace the answers of a data set by the target's own.
///
/// Writes one row per question, in order: question, answer, input_ids, loss_mask, finished. A
/// stopped run leaves FILE.partial; the same command continues it.
#[derive(Debug, Clone, Args)]
pub struct RegenerateArgs {
    /// Directory of the target model.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Conversations or questions, JSON or JSONL.
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// JSONL file to write.
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// Tokens of an answer at most.
    #[arg(long, value_name = "N", default_value_t = 220, value_parser = at_least_one)]
    pub max_new_tokens: usize,
    /// Use the first N rows of the data only.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit: Option<usize>,
    /// Sequences decoded together.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    pub batch: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: RegenerateArgs,
    }

    fn parse(more: &str) -> Result<RegenerateArgs, String> {
        let line = format!("regenerate --model m --data d --output o {more}");
        let parsed = Line::try_parse_from(line.split_whitespace());
        parsed.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn answers_are_cut_where_the_published_data_cut_them() {
        let args = parse("").unwrap();
        assert_eq!((args.max_new_tokens, args.limit, args.batch), (220, None, 128));
    }

    #[test]
    fn senseless_numbers_are_refused() {
        assert!(parse("--batch 0").unwrap_err().contains("at least 1"));
        assert!(parse("--max-new-tokens many").is_err());
        assert_eq!(parse("--limit 3").unwrap().limit, Some(3));
    }
}
