//! The flags of `dflash eval`.

use std::path::PathBuf;

use clap::Args;

/// Measure a drafter: real speculative decoding against plain greedy decoding.
///
/// Answers every prompt twice, with and without the drafter, and prints acceptance, speed and
/// whether the texts are identical token for token.
#[derive(Debug, Clone, Args)]
pub struct EvalArgs {
    /// Directory of the target model.
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,
    /// Directory of the drafter.
    #[arg(long, value_name = "DIR")]
    pub draft: PathBuf,
    /// Prompts, JSON or JSONL: question/answer, messages, ShareGPT, `turns` or input_ids rows.
    #[arg(long, value_name = "FILE")]
    pub prompts: PathBuf,
    /// Tokens of an answer at most.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub max_new_tokens: usize,
    /// Use the first N rows of the prompts only.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit: Option<usize>,
    /// Also write the report as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Sample at this temperature, with exact speculative sampling; 0 is greedy.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f64,
    /// Seed of the samples.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Two tokens whose logits differ by no more than this are a tie [default: what rounding in
    /// the target's precision explains].
    #[arg(long, value_name = "X")]
    pub tie_tolerance: Option<f64>,
}

/// A count for which zero makes no sense.
pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(count) => Ok(count),
        Err(error) => Err(format!("{error}")),
    }
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value >= 0.0 && value.is_finite() => Ok(value),
        Ok(_) => Err("must be 0 or a positive number".into()),
        Err(error) => Err(format!("{error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: EvalArgs,
    }

    fn parse(more: &str) -> Result<EvalArgs, String> {
        let line = format!("eval --target t --draft d --prompts p {more}");
        let parsed = Line::try_parse_from(line.split_whitespace());
        parsed.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_greedy_and_unlimited() {
        let args = parse("").unwrap();
        assert_eq!((args.temperature, args.limit, args.json), (0.0, None, None));
    }

    #[test]
    fn senseless_numbers_are_refused() {
        assert!(parse("--limit 0").unwrap_err().contains("at least 1"));
        assert!(parse("--max-new-tokens 0").unwrap_err().contains("at least 1"));
        assert!(parse("--temperature -1").is_err());
        assert!(parse("--temperature nan").unwrap_err().contains("positive"));
        assert_eq!(parse("--temperature 0.7").unwrap().temperature, 0.7);
    }
}
