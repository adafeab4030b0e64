//! Requests to an engine, and their outputs.

use dflash_settings::Speculate;
use dflash_target::Target;

use crate::adjust::LogitAdjustments;
use crate::grammar::Grammar;
use crate::limits::Limits;
use crate::sampling::Sampling;

/// Limits of an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Maximum number of active sequences.
    pub max_sequences: usize,
    /// Maximum sequence length in tokens, prompt and answer together.
    pub max_model_len: usize,
    /// Maximum prompt tokens per step, to bound the delay of decoding sequences.
    pub prefill_tokens: usize,
    /// Memory limit for retained prefix caches, bytes.
    pub prefix_bytes: usize,
    /// Number of tokens proposed at a time.
    pub speculate: Speculate,
}

/// A request to an engine.
#[derive(Debug, Clone)]
pub struct Request {
    /// Prompt tokens, at least one.
    pub prompt: Vec<i64>,
    /// Maximum answer tokens, including the end token; with 0 only the prompt is read.
    pub max_new_tokens: usize,
    /// Tokens that end the answer.
    pub stop_ids: Vec<i64>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Changes of the logits before sampling.
    pub adjustments: LogitAdjustments,
    /// Grammar that constrains the answer; at its own end the text must satisfy it completely.
    pub grammar: Option<Grammar>,
    /// Random seed.
    pub seed: u64,
    /// Report each token's log-probability, and those of this many most likely tokens.
    pub logprobs: Option<usize>,
    /// Also report log-probabilities of the prompt. It is then read without cached prefixes.
    pub prompt_logprobs: bool,
    /// Whether to use proposals, if there is a proposer.
    pub speculative: bool,
}

impl EngineOptions {
    /// For one sequence at a time of the target's maximum length, whose prompt is read in one pass.
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
    /// A request to answer `prompt` within `limits`, with proposals if there is a proposer.
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

/// Identifies a sequence of an engine; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

impl SequenceId {
    pub(super) fn numbered(number: u64) -> Self {
        Self(number)
    }
}

/// Output of one step for one sequence.
#[derive(Debug, Clone)]
pub struct Output {
    /// The sequence.
    pub id: SequenceId,
    /// New tokens, cut at the answer's end.
    pub tokens: Vec<NewToken>,
    /// Log-probabilities of the prompt from its second token on, if requested; with the first
    /// output.
    pub prompt: Vec<Logprob>,
    /// The verified block; `None` for the first token, from the prompt, and without proposals.
    pub block: Option<Block>,
    /// Why the answer ended; the sequence has then been removed.
    pub finish: Option<Finish>,
    /// Prompt tokens copied from a cached prefix.
    pub cached_tokens: usize,
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct NewToken {
    /// The token.
    pub id: i64,
    /// If requested.
    pub logprob: Option<Logprob>,
}

/// Log-probabilities (natural) under the target's logits, before temperature and filters.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprob {
    /// Of the chosen token.
    pub chosen: f64,
    /// Of the most likely tokens, in descending order.
    pub top: Vec<(i64, f64)>,
}

/// A verified block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Block {
    /// The proposals.
    pub proposed: Vec<i64>,
    /// Number of leading proposals that the target accepted.
    pub accepted: usize,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end token.
    Stop,
    /// The length limit.
    Length,
    /// Computing the grammar's next tokens would exceed its limits.
    Grammar,
}
