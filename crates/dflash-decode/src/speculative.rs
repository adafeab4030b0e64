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
use dflash_model::ops::most_likely;
use dflash_model::target::{CachedOutput, KvCache, Target, check_layer_ids};
use tch::{Kind, Tensor, no_grad};

use crate::Error;
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
    target: &'a Target,
    draft: &'a Draft,
    cache: KvCache,
    context: ContextCache,
    /// Embeddings of the B-1 mask tokens [B-1, H].
    masks_bh: Tensor,
    /// Output projection of a draft with a vocabulary of its own; else it is the target's.
    head: Option<PrunedHead>,
    sampler: Sampler,
}

/// The part of the target's lm_head that the draft was trained with.
#[derive(Debug)]
struct PrunedHead {
    /// The selected tokens `[v]`, ascending.
    ids_v: Tensor,
    /// Their columns of the lm_head [H, v].
    lm_head_hv: Tensor,
}

/// The draft's block: tokens, and the distributions they were drawn from when sampling.
#[derive(Debug)]
struct Proposal {
    ids_b: Tensor,
    distributions_bv: Option<Tensor>,
}

/// The outcome of one verification.
#[derive(Debug)]
struct Verified {
    /// Accepted proposals.
    accepted: Vec<i64>,
    /// The target's own token after them.
    bonus: i64,
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
        check_fit(target, draft, vocabulary)?;
        let config = draft.config();
        let masks = vec![config.mask_token_id; config.block_size - 1];
        let masks_bh =
            no_grad(|| target.embed(&Tensor::from_slice(&masks).to_device(target.device())));
        let (cache, context) = (target.new_cache(0), draft.new_cache(0));
        let head = vocabulary.map(|vocabulary| PrunedHead::new(target, vocabulary));
        Ok(Self { target, draft, cache, context, masks_bh, head, sampler })
    }

    /// Slots of the draft's blocks, the anchor's included.
    pub fn block_size(&self) -> usize {
        self.draft.config().block_size
    }

    /// Tokens that the draft can propose, where these are not all of the target's.
    pub fn vocabulary_size(&self) -> Option<usize> {
        self.head.as_ref().map(|head| head.ids_v.size()[0] as usize)
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
                let verified = self.step(bonus);
                bonus = verified.bonus;
                accepted.push(verified.accepted.len());
                verified.accepted.into_iter().chain([bonus]).for_each(|id| answer.push(id));
            }
            Ok(Speculation { generation: answer.finish(), accepted })
        })
    }

    /// Empties both caches and makes room for a sequence of `tokens`.
    fn reset(&mut self, tokens: usize) {
        // The last step verifies a whole block, even where the limit cuts it.
        let tokens = tokens + self.draft.config().block_size;
        if self.cache.capacity() < tokens {
            let capacity = roomy(tokens);
            self.cache = self.target.new_cache(capacity);
            self.context = self.draft.new_cache(capacity as i64);
        }
        self.cache.truncate(0);
        self.context.truncate(0);
    }

    /// Runs the prompt through both models; returns the first token of the answer.
    fn prefill(&mut self, prompt: &[i64]) -> i64 {
        let output = self.run_target(&self.to_device(prompt));
        let rows = prompt.len() as i64;
        self.keep(&output, 0, rows);
        self.sampler.next(self.target, &output.hidden_td.narrow(0, rows - 1, 1))
    }

    fn step(&mut self, bonus: i64) -> Verified {
        let anchor = self.cache.len() as i64;
        let bonus_1 = self.to_device(&[bonus]);
        let proposal = self.propose(&bonus_1, anchor);
        let output = self.run_target(&Tensor::cat(&[&bonus_1, &proposal.ids_b], 0));
        let verified = match &proposal.distributions_bv {
            None => verify_greedy(&proposal.ids_b, &self.target.most_likely(&output.hidden_td)),
            Some(draft_bv) => {
                let logits_bv = self.target.logits(&output.hidden_td);
                self.verify_sampled(&proposal.ids_b, draft_bv, &logits_bv)
            }
        };
        self.keep(&output, anchor, verified.accepted.len() as i64 + 1);
        verified
    }

    /// B-1 proposals for the positions after `anchor`.
    fn propose(&mut self, bonus_1: &Tensor, anchor: i64) -> Proposal {
        let block_bh = Tensor::cat(&[&self.target.embed(bonus_1), &self.masks_bh], 0);
        let normed_bh = self.draft.forward_block(&self.context, &block_bh, anchor);
        let slots = self.masks_bh.size()[0];
        let normed_bh = normed_bh.narrow(0, 1, slots);
        if self.sampler.is_greedy() {
            let ids_b = match &self.head {
                None => self.target.most_likely_of_normed(&normed_bh),
                Some(head) => {
                    let chosen_b = most_likely(&normed_bh.mm(&head.lm_head_hv));
                    head.ids_v.index_select(0, &chosen_b)
                }
            };
            return Proposal { ids_b, distributions_bv: None };
        }
        let logits_bv = match &self.head {
            None => self.target.lm_head(&normed_bh),
            Some(head) => normed_bh.mm(&head.lm_head_hv),
        };
        let mut distributions_bv = self.sampler.distributions(&logits_bv);
        if let Some(head) = &self.head {
            distributions_bv = head.widen(&distributions_bv, self.target);
        }
        let ids = self.sampler.draw(&distributions_bv);
        Proposal { ids_b: self.to_device(&ids), distributions_bv: Some(distributions_bv) }
    }

    /// Exact speculative sampling: accept with min(1, p/q), else draw from the part of p above q.
    fn verify_sampled(
        &mut self,
        ids_b: &Tensor,
        draft_bv: &Tensor,
        logits_bv: &Tensor,
    ) -> Verified {
        let target_bv = self.sampler.distributions(logits_bv);
        let ids = to_host(ids_b);
        let slots = ids.len() as i64;
        let of_proposed = |distributions: &Tensor| -> Vec<f64> {
            let chosen = distributions.narrow(0, 0, slots).gather(1, &ids_b.unsqueeze(1), false);
            Vec::try_from(chosen.flatten(0, -1)).expect("probabilities are float64")
        };
        let (p, q) = (of_proposed(&target_bv), of_proposed(draft_bv));
        let rejected = (0..ids.len()).find(|&slot| self.sampler.uniform() * q[slot] >= p[slot]);
        let row = |distributions: &Tensor, slot: usize| distributions.narrow(0, slot as i64, 1);
        let weights_1v = match rejected {
            None => row(&target_bv, ids.len()),
            Some(slot) => (row(&target_bv, slot) - row(draft_bv, slot)).clamp_min(0.0),
        };
        let bonus = self.sampler.draw(&weights_1v)[0];
        Verified { accepted: ids[..rejected.unwrap_or(ids.len())].to_vec(), bonus }
    }

    fn run_target(&mut self, ids_t: &Tensor) -> CachedOutput {
        let layer_ids = &self.draft.config().target_layer_ids;
        self.target.forward_cached(ids_t, &mut self.cache, layer_ids)
    }

    /// Keeps the first `rows` of what the target just ran, at positions from `first` on.
    fn keep(&mut self, output: &CachedOutput, first: i64, rows: i64) {
        self.cache.truncate((first + rows) as usize);
        let kept: Vec<Tensor> =
            output.captures.iter().map(|capture| capture.narrow(0, 0, rows)).collect();
        self.draft.extend_context(&mut self.context, &Tensor::cat(&kept, 1), first);
    }

    fn to_device(&self, ids: &[i64]) -> Tensor {
        Tensor::from_slice(ids).to_device(self.target.device())
    }
}

impl PrunedHead {
    fn new(target: &Target, vocabulary: &DraftVocabulary) -> Self {
        let ids_v = Tensor::from_slice(vocabulary.selected()).to_device(target.device());
        let lm_head_hv = no_grad(|| target.lm_head_columns(&ids_v));
        Self { ids_v, lm_head_hv }
    }

    /// Distributions over the selected tokens as ones over all of the target's, zero elsewhere.
    fn widen(&self, distributions_bv: &Tensor, target: &Target) -> Tensor {
        let shape = [distributions_bv.size()[0], target.vocab_size()];
        let options = (distributions_bv.kind(), distributions_bv.device());
        Tensor::zeros(shape, options).index_copy(1, &self.ids_v, distributions_bv)
    }
}

/// Accepts proposals while they are the target's most likely tokens `own_b`.
fn verify_greedy(ids_b: &Tensor, own_b: &Tensor) -> Verified {
    // One transfer for both: on a GPU every read waits for the whole step.
    let slots = ids_b.size()[0] as usize;
    let both = to_host(&Tensor::cat(&[ids_b, own_b], 0));
    let (proposed, own) = both.split_at(slots);
    let accepted = proposed.iter().zip(own).take_while(|(proposal, own)| proposal == own).count();
    Verified { accepted: proposed[..accepted].to_vec(), bonus: own[accepted] }
}

fn to_host(ids: &Tensor) -> Vec<i64> {
    Vec::try_from(ids.to_kind(Kind::Int64)).expect("token ids are integers")
}

fn check_fit(
    target: &Target,
    draft: &Draft,
    vocabulary: Option<&DraftVocabulary>,
) -> Result<(), Error> {
    let config = draft.config();
    let rows = target.vocab_size();
    let pairs = [
        ("hidden_size", config.hidden_size, target.hidden_size()),
        ("vocab_size", config.vocab_size, rows),
        (
            "the number of target layers",
            config.num_target_layers.unwrap_or(target.num_layers()) as i64,
            target.num_layers() as i64,
        ),
        (
            "the number of tokens that its vocabulary was selected from",
            vocabulary.map_or(rows, |vocabulary| vocabulary.target_size() as i64),
            rows,
        ),
    ];
    if let Some(&(what, draft, target)) = pairs.iter().find(|(_, draft, target)| draft != target) {
        return Err(Error::Mismatch { what, draft, target });
    }
    check_layer_ids(&config.target_layer_ids, target.num_layers())?;
    let mask = config.mask_token_id;
    if !(0..rows).contains(&mask) {
        return Err(Error::Mismatch { what: "mask_token_id", draft: mask, target: rows });
    }
    Ok(())
}
