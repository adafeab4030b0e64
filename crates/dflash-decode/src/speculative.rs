//! The speculative loop: propose a block, verify it in one pass, keep what the target agrees with.
//!
//! A step starts from the bonus token, whose own state neither cache holds yet. The draft sees the
//! features of all tokens before it and proposes B-1 tokens; the target runs once over the block of
//! B. The longest matching prefix is accepted, the target's own next token becomes the new bonus,
//! the features of the n+1 rows that remain go to the draft's context, and the target's cache is cut
//! back to them. The draft's cache holds accepted context only, so it needs no cut.

use std::sync::atomic::AtomicBool;

use dflash_model::draft::{ContextCache, Draft};
use dflash_model::objective::DraftVocabulary;
use dflash_model::target::{CachedOutput, KvCache, Target};
use tch::{Tensor, no_grad};

use crate::Error;
use crate::drafter::{Drafter, Proposal, Verified};
use crate::few_rows::FewRowsSteps;
use crate::plain::{Answer, Generation, Limits, check, roomy};
use crate::sampling::Sampler;

/// One answer and how its steps went.
#[derive(Debug, Clone, PartialEq)]
pub struct Speculation {
    /// The answer.
    pub generation: Generation,
    /// Accepted proposals of each verify step, not cut by the answer's end.
    pub accepted: Vec<usize>,
}

/// Speculative decoding of one sequence at a time; its caches are reused between them.
#[derive(Debug)]
pub struct Speculator<'a> {
    drafter: Drafter<'a>,
    /// Where greedy steps make no tensors.
    few_rows: Option<FewRowsSteps<'a>>,
    cache: KvCache,
    context: ContextCache,
    sampler: Sampler,
}

impl<'a> Speculator<'a> {
    /// A decoder of `target` with the proposals of `draft`, only tokens of `vocabulary` where it was
    /// trained to say no others; both choose tokens by `sampler`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when draft and target differ in size, or the vocabulary was selected from
    /// another number of tokens; a layer id or mask token that the target does not have.
    pub fn new(
        target: &'a Target,
        draft: &'a Draft,
        vocabulary: Option<&DraftVocabulary>,
        sampler: Sampler,
    ) -> Result<Self, Error> {
        let drafter = Drafter::new(target, draft, vocabulary)?;
        let (cache, context) = (target.new_cache(0), draft.new_cache(0));
        let few_rows = if sampler.is_greedy() { FewRowsSteps::new(&drafter) } else { None };
        Ok(Self { drafter, few_rows, cache, context, sampler })
    }

    /// Slots of the draft's blocks, the anchor's included.
    pub fn block_size(&self) -> usize {
        self.drafter.block_size()
    }

    /// Tokens that the draft can propose, where these are not all of the target's.
    pub fn vocabulary_size(&self) -> Option<usize> {
        self.drafter.vocabulary_size()
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
    ) -> Result<Speculation, Error> {
        no_grad(|| {
            let mut answer = Answer::start(limits);
            self.reset(prompt.len() + limits.max_new_tokens);
            let mut bonus = self.prefill(prompt);
            answer.begin(bonus);
            let mut accepted = Vec::new();
            while !answer.ended() {
                check(stop)?;
                let count = self.step(bonus, &mut |id| {
                    bonus = id;
                    answer.push(id);
                });
                accepted.push(count - 1);
            }
            Ok(Speculation { generation: answer.finish(), accepted })
        })
    }

    /// Empties both caches and makes room for a sequence of `tokens`.
    fn reset(&mut self, tokens: usize) {
        // The last step verifies a whole block, even where the limit cuts it.
        let tokens = tokens + self.block_size();
        if self.cache.capacity() < tokens {
            let capacity = roomy(tokens);
            self.cache = self.drafter.target.new_cache(capacity);
            self.context = self.drafter.draft.new_cache(capacity as i64);
        }
        self.cache.truncate(0);
        self.context.truncate(0);
    }

    /// Runs the prompt through both models; returns the first token of the answer.
    fn prefill(&mut self, prompt: &[i64]) -> i64 {
        let output = self.run_target(&self.to_device(prompt));
        let rows = prompt.len() as i64;
        self.keep(&output, 0, rows);
        self.sampler.next(self.drafter.target, &output.hidden_td.narrow(0, rows - 1, 1))
    }

    /// Passes the step's tokens to `take`, the next bonus token last; returns how many they are.
    fn step(&mut self, bonus: i64, take: &mut dyn FnMut(i64)) -> usize {
        let Some(few_rows) = &mut self.few_rows else {
            let tokens = self.tensor_step(bonus).into_tokens();
            tokens.iter().for_each(|&id| take(id));
            return tokens.len();
        };
        let caches = (&mut self.cache, &mut self.context);
        let tokens = few_rows.step(bonus, self.drafter.head.as_ref(), caches);
        tokens.iter().for_each(|&id| take(id));
        tokens.len()
    }

    fn tensor_step(&mut self, bonus: i64) -> Verified {
        let anchor = self.cache.len() as i64;
        let bonus_1 = self.to_device(&[bonus]);
        let proposal = self.propose(&bonus_1, anchor);
        let output = self.run_target(&Tensor::cat(&[&bonus_1, &proposal.ids_b], 0));
        let target = self.drafter.target;
        let verified = match self.sampler.is_greedy() {
            true => proposal.verify_greedy(&target.most_likely(&output.hidden_td)),
            false => proposal.verify(&target.logits(&output.hidden_td), &mut self.sampler),
        };
        self.keep(&output, anchor, verified.accepted.len() as i64 + 1);
        verified
    }

    /// B-1 proposals for the positions after `anchor`.
    fn propose(&mut self, bonus_1: &Tensor, anchor: i64) -> Proposal {
        let block_bh = self.drafter.blocks(bonus_1);
        let normed_bh = self.drafter.draft.forward_block(&self.context, &block_bh, anchor);
        match self.sampler.is_greedy() {
            true => self.drafter.propose_greedy(&normed_bh),
            false => self.drafter.propose(&self.drafter.logits(&normed_bh), &mut self.sampler),
        }
    }

    fn run_target(&mut self, ids_t: &Tensor) -> CachedOutput {
        let layer_ids = &self.drafter.draft.config().target_layer_ids;
        self.drafter.target.forward_cached(ids_t, &mut self.cache, layer_ids)
    }

    /// Keeps the first `rows` of what the target just ran, at positions from `first` on.
    fn keep(&mut self, output: &CachedOutput, first: i64, rows: i64) {
        self.cache.truncate((first + rows) as usize);
        let kept: Vec<Tensor> =
            output.captures.iter().map(|capture| capture.narrow(0, 0, rows)).collect();
        self.drafter.draft.extend_context(&mut self.context, &Tensor::cat(&kept, 1), first);
    }

    fn to_device(&self, ids: &[i64]) -> Tensor {
        Tensor::from_slice(ids).to_device(self.drafter.target.device())
    }
}
