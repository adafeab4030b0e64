//! Look-up decoding, a draft that costs nothing: where the last tokens stood earlier in the text, what
//! followed them there is proposed, and the target checks it in one pass as it checks any draft.
//!
//! The longest run of last tokens that is found counts, and of several places the latest. Where none
//! is found, the step is one of plain decoding.

use std::sync::atomic::AtomicBool;

use dflash_model::target::{KvCache, Target};
use tch::{Tensor, no_grad};

use crate::Error;
use crate::drafter::to_host;
use crate::plain::{Answer, Limits, check, roomy};
use crate::sampling::Sampler;
use crate::speculative::Speculation;

/// Look-up decoding of one sequence at a time; its cache is reused between them.
#[derive(Debug)]
pub struct NgramDecoder<'a> {
    target: &'a Target,
    cache: KvCache,
    sampler: Sampler,
    /// The longest run of last tokens that is looked up.
    size: usize,
    /// Tokens proposed at a time.
    proposals: usize,
}

impl<'a> NgramDecoder<'a> {
    /// A decoder of `target` that looks up the last `size` tokens, or fewer, and proposes at most
    /// `proposals`; the target chooses tokens by `sampler`.
    pub fn new(target: &'a Target, (size, proposals): (usize, usize), sampler: Sampler) -> Self {
        Self { target, cache: target.new_cache(0), sampler, size, proposals }
    }

    /// Slots of a block, the anchor's included.
    pub fn block_size(&self) -> usize {
        self.proposals + 1
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
            // The last step verifies a whole block, even where the limit cuts it.
            let tokens = prompt.len() + limits.max_new_tokens + self.block_size();
            if self.cache.capacity() < tokens {
                self.cache = self.target.new_cache(roomy(tokens));
            }
            self.cache.truncate(0);
            let mut text = prompt.to_vec();
            let last_1d = self.run(prompt).narrow(0, prompt.len() as i64 - 1, 1);
            text.push(self.sampler.next(self.target, &last_1d));
            answer.begin(text[prompt.len()]);
            let mut accepted = Vec::new();
            while !answer.ended() {
                check(stop)?;
                let known = text.len();
                accepted.push(self.step(&mut text));
                text[known..].iter().for_each(|&id| answer.push(id));
            }
            Ok(Speculation { generation: answer.finish(), accepted })
        })
    }

    /// Appends what one step adds to `text`, whose last token the cache does not hold yet; how many
    /// proposals were accepted.
    fn step(&mut self, text: &mut Vec<i64>) -> usize {
        let anchor = text.len() - 1;
        let proposed = look_up(text, self.size, self.proposals).to_vec();
        let block: Vec<i64> = text[anchor..].iter().chain(&proposed).copied().collect();
        let hidden_td = self.run(&block);
        let (accepted, bonus) = match self.sampler.is_greedy() {
            true => verify_greedy(&proposed, &to_host(&self.target.most_likely(&hidden_td))),
            false => self.verify_sampled(&proposed, &self.target.logits(&hidden_td)),
        };
        self.cache.truncate(anchor + accepted + 1);
        text.extend(&proposed[..accepted]);
        text.push(bonus);
        accepted
    }

    fn run(&mut self, ids: &[i64]) -> Tensor {
        let ids_t = Tensor::from_slice(ids).to_device(self.target.device());
        self.target.forward_cached(&ids_t, &mut self.cache, &[]).hidden_td
    }

    /// Exact speculative sampling of proposals that were certain: accept with the target's own
    /// probability, else draw from what is left without the proposal.
    fn verify_sampled(&mut self, proposed: &[i64], logits_bv: &Tensor) -> (usize, i64) {
        let target_bv = self.sampler.distributions(logits_bv);
        for (slot, &id) in proposed.iter().enumerate() {
            let weights_1v = target_bv.narrow(0, slot as i64, 1);
            if self.sampler.uniform() >= weights_1v.double_value(&[0, id]) {
                let _ = weights_1v.narrow(1, id, 1).zero_();
                return (slot, self.sampler.draw(&weights_1v)[0]);
            }
        }
        let last_1v = target_bv.narrow(0, proposed.len() as i64, 1);
        (proposed.len(), self.sampler.draw(&last_1v)[0])
    }
}

/// Accepts proposals while they are the `own` choices of the target; how many, and its next one.
fn verify_greedy(proposed: &[i64], own: &[i64]) -> (usize, i64) {
    let accepted = proposed.iter().zip(own).take_while(|(proposal, own)| proposal == own).count();
    (accepted, own[accepted])
}

/// What followed the last tokens of `text` where they stood before: of the longest run of at most
/// `size` that is found, and there the latest place, at most `proposals` tokens.
fn look_up(text: &[i64], size: usize, proposals: usize) -> &[i64] {
    let end = text.len();
    for size in (1..=size.min(end.saturating_sub(1))).rev() {
        let (earlier, last) = (&text[..end - 1], &text[end - size..]);
        if let Some(at) = earlier.windows(size).rposition(|window| window == last) {
            let from = at + size;
            return &text[from..end.min(from + proposals)];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_run_counts_and_of_its_places_the_latest() {
        let check = |text: &[i64], size, proposals, expect: &[i64]| {
            assert_eq!(look_up(text, size, proposals), expect, "{text:?} {size} {proposals}");
        };
        check(&[1, 2, 3, 4, 1, 2], 3, 10, &[3, 4, 1, 2]);
        check(&[1, 2, 3, 4, 1, 2], 3, 1, &[3]);
        check(&[1, 2, 3, 9, 2, 4, 1, 2], 3, 2, &[3, 9]);
        check(&[1, 2, 3, 9, 2, 4, 1, 2], 1, 2, &[4, 1]);
        check(&[7, 7, 7], 3, 10, &[7]);
        check(&[1, 2, 3], 3, 10, &[]);
        check(&[1], 3, 10, &[]);
    }

    #[test]
    fn greedy_verification_stops_at_the_first_other_token() {
        assert_eq!(verify_greedy(&[1, 2], &[1, 2, 0]), (2, 0));
        assert_eq!(verify_greedy(&[1, 1], &[1, 2, 0]), (1, 2));
        assert_eq!(verify_greedy(&[], &[1]), (0, 1));
    }
}
