//! What is asked of an engine, and what comes of it.

use dflash_settings::Speculate;
use dflash_target::Target;

use crate::adjust::LogitAdjustments;
use crate::grammar::Grammar;
use crate::limits::Limits;
use crate::sampling::Sampling;

/// What an engine may use.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Sequences decoded together at most.
    pub max_sequences: usize,
    /// Tokens of a sequence at most, prompt and answer together.
    pub max_model_len: usize,
    /// Tokens of prompts that one step reads at most, so that those who decode do not wait long.
    pub prefill_tokens: usize,
    /// Bytes that the caches of finished sequences take at most.
    pub prefix_bytes: usize,
    /// How many tokens are proposed at a time.
    pub speculate: Speculate,
}

/// What is asked of an engine.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<i64>,
    /// Tokens of the answer at most, its end token included; with 0 the prompt is read and nothing said.
    pub max_new_tokens: usize,
    /// Tokens that end the answer.
    pub stop_ids: Vec<i64>,
    /// How its tokens are chosen.
    pub sampling: Sampling,
    /// What is done to the logits before.
    pub adjustments: LogitAdjustments,
    /// What the answer's text must be a beginning of, and its whole where it ends by itself.
    pub grammar: Option<Grammar>,
    /// Seed of the choice.
    pub seed: u64,
    /// Report the logarithm of each token's probability, and of so many of the most likely ones.
    pub logprobs: Option<usize>,
    /// Report the same of the prompt's tokens. The prompt is read whole then, whatever others have of it.
    pub prompt_logprobs: bool,
    /// Whether tokens may be proposed, where there is something that proposes them.
    pub speculative: bool,
}

impl EngineOptions {
    /// For one sequence at a time, of all that `target` takes, whose prompt is read at once.
    pub fn one_by_one(target: &Target, speculate: Speculate) -> Self {
        let max_model_len = target.config().max_position_embeddings as usize;
        Self {
            max_sequences: 1,
            max_model_len,
            prefill_tokens: max_model_len,
            prefix_bytes: 0,
            speculate,
        }
    }
}

impl Request {
    /// To answer `prompt` within `limits`, with proposals where there are some.
    pub fn new(prompt: &[i64], limits: &Limits, sampling: Sampling, seed: u64) -> Self {
        Self {
            prompt: prompt.to_vec(),
            max_new_tokens: limits.max_new_tokens,
            stop_ids: limits.stop_ids.clone(),
            sampling,
            adjustments: LogitAdjustments::default(),
            grammar: None,
            seed,
            logprobs: None,
            prompt_logprobs: false,
            speculative: true,
        }
    }
}

/// A sequence of an engine, never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

impl SequenceId {
    pub(super) fn numbered(number: u64) -> Self {
        Self(number)
    }
}

/// What a step made of a sequence.
#[derive(Debug, Clone)]
pub struct Output {
    /// The sequence.
    pub id: SequenceId,
    /// New tokens, cut at the answer's end.
    pub tokens: Vec<NewToken>,
    /// Of the prompt's tokens from the second one on, where that was asked for; with the first output.
    pub prompt: Vec<Logprob>,
    /// The block that was verified; `None` for the token that the prompt itself gives, and where nothing
    /// was proposed.
    pub block: Option<Block>,
    /// Why the answer ends here. The sequence is gone then.
    pub finish: Option<Finish>,
    /// Tokens of the prompt that were not read but copied.
    pub cached_tokens: usize,
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct NewToken {
    /// The token.
    pub id: i64,
    /// Where they were asked for.
    pub logprob: Option<Logprob>,
}

/// Natural logarithms of probabilities by the target's logits, before temperature and filters.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprob {
    /// Of the token.
    pub chosen: f64,
    /// Of the most likely ones, these first.
    pub top: Vec<(i64, f64)>,
}

/// A verified block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Block {
    /// What was proposed.
    pub proposed: Vec<i64>,
    /// How many of these, from the first on, the target accepted.
    pub accepted: usize,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// By an end token.
    Stop,
    /// It has as many tokens as it may.
    Length,
    /// What its grammar allows next takes more to find out than it may.
    Grammar,
}
