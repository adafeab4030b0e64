//! Plain decoding of the target: one token a step, over a key/value cache.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use dflash_model::target::{KvCache, Target, TargetConfig};
use dflash_text::ChatTokenizer;
use tch::Tensor;

use crate::Error;
use crate::few_rows::FewRowsPlain;
use crate::sampling::Sampler;

/// When an answer ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the answer at most, its end token included.
    pub max_new_tokens: usize,
    /// Tokens that end it.
    pub stop_ids: Vec<i64>,
}

impl Limits {
    /// Ends answers with the end tokens of the target's configuration and of its tokenizer.
    pub(crate) fn new(
        target: &TargetConfig,
        tokenizer: &ChatTokenizer,
        max_new_tokens: usize,
    ) -> Self {
        let mut stop_ids = target.eos_token_ids.clone();
        stop_ids.extend(tokenizer.special_ids().eos);
        Self { max_new_tokens, stop_ids }
    }
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// Its tokens, the end token included where one was made.
    pub tokens: Vec<i64>,
    /// Whether an end token was made, rather than the length limit reached.
    pub finished: bool,
    /// Seconds from the prompt to the first token.
    pub prefill_seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
}

impl Generation {
    /// Seconds from the prompt to the last token.
    pub fn seconds(&self) -> f64 {
        self.prefill_seconds + self.decode_seconds
    }
}

/// An answer in the making: collects tokens until a limit and keeps the time.
#[derive(Debug)]
pub(crate) struct Answer<'a> {
    limits: &'a Limits,
    started: Instant,
    generation: Generation,
}

impl<'a> Answer<'a> {
    pub(crate) fn start(limits: &'a Limits) -> Self {
        let tokens = Vec::with_capacity(limits.max_new_tokens);
        let generation =
            Generation { tokens, finished: false, prefill_seconds: 0.0, decode_seconds: 0.0 };
        Self { limits, started: Instant::now(), generation }
    }

    /// Ends the prefill with its first token.
    pub(crate) fn begin(&mut self, first: i64) {
        self.generation.prefill_seconds = self.started.elapsed().as_secs_f64();
        self.push(first);
    }

    /// Takes one token, unless the answer has ended.
    pub(crate) fn push(&mut self, token: i64) {
        if !self.ended() {
            self.generation.tokens.push(token);
            self.generation.finished = self.limits.stop_ids.contains(&token);
        }
    }

    pub(crate) fn ended(&self) -> bool {
        self.generation.finished || self.generation.tokens.len() >= self.limits.max_new_tokens
    }

    pub(crate) fn finish(mut self) -> Generation {
        let total = self.started.elapsed().as_secs_f64();
        self.generation.decode_seconds = total - self.generation.prefill_seconds;
        self.generation
    }
}

/// Greedy (or sampled) decoding of one sequence at a time; its cache is reused between them.
#[derive(Debug)]
pub struct PlainDecoder<'a> {
    target: &'a Target,
    /// Where greedy steps make no tensors.
    few_rows: Option<FewRowsPlain<'a>>,
    cache: KvCache,
    sampler: Sampler,
}

impl<'a> PlainDecoder<'a> {
    /// A decoder of `target` that chooses tokens by `sampler`.
    pub fn new(target: &'a Target, sampler: Sampler) -> Self {
        let few_rows = if sampler.is_greedy() { FewRowsPlain::new(target) } else { None };
        Self { target, few_rows, cache: target.new_cache(0), sampler }
    }

    /// Answers `prompt`.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when `stop` is set.
    ///
    /// # Panics
    /// When the prompt is empty.
    pub fn generate(
        &mut self,
        prompt: &[i64],
        limits: &Limits,
        stop: &AtomicBool,
    ) -> Result<Generation, Error> {
        let mut answer = Answer::start(limits);
        let tokens = prompt.len() + limits.max_new_tokens;
        if self.cache.capacity() < tokens {
            self.cache = self.target.new_cache(roomy(tokens));
        }
        self.cache.truncate(0);
        let mut next = self.next(prompt);
        answer.begin(next);
        while !answer.ended() {
            check(stop)?;
            next = match &mut self.few_rows {
                Some(few_rows) => few_rows.next(next, &mut self.cache),
                None => self.next(&[next]),
            };
            answer.push(next);
        }
        Ok(answer.finish())
    }

    /// Appends `ids` to the sequence and chooses the token after them.
    fn next(&mut self, ids: &[i64]) -> i64 {
        let ids_t = Tensor::from_slice(ids).to_device(self.target.device());
        let hidden_td = self.target.forward_cached(&ids_t, &mut self.cache, &[]).hidden_td;
        let last = hidden_td.narrow(0, ids.len() as i64 - 1, 1);
        tch::no_grad(|| self.sampler.next(self.target, &last))
    }
}

/// A capacity for `tokens` that spares most later sequences a new cache.
pub(crate) fn roomy(tokens: usize) -> usize {
    tokens.next_multiple_of(256)
}

/// Fails once the user asked to stop.
pub(crate) fn check(stop: &AtomicBool) -> Result<(), Error> {
    if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(max_new_tokens: usize, tokens: &[i64]) -> Generation {
        let limits = Limits { max_new_tokens, stop_ids: vec![9, 8] };
        let mut answer = Answer::start(&limits);
        answer.begin(tokens[0]);
        tokens[1..].iter().for_each(|&token| answer.push(token));
        answer.finish()
    }

    #[test]
    fn an_answer_ends_with_its_end_token_or_at_the_limit() {
        let check = |max, tokens: &[i64], expected: &[i64], finished| {
            let generation = collect(max, tokens);
            assert_eq!((generation.tokens.as_slice(), generation.finished), (expected, finished));
        };
        check(5, &[1, 9, 3], &[1, 9], true);
        check(5, &[8, 1], &[8], true);
        check(2, &[1, 2, 9], &[1, 2], false);
        check(3, &[1, 2, 9, 4], &[1, 2, 9], true);
    }
}
