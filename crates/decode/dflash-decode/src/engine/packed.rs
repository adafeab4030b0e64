//! A step on a CPU with packed few-row passes: buffers are reused, and greedy tokens need no
//! tensors.
//!
//! Sequences that are few rows together share a pass. Shapes: `b` slots of a block, `k` auxiliary
//! layers, `h` hidden, `r` rows of a pass.

use std::time::Instant;

use dflash_draft::{BlockShape, ContextPart};
use dflash_target::{KvCache, Target};
use tch::Tensor;

use super::lengths::Cost;
use super::proposer::Proposer;
use super::sequence::Sequence;
use super::{Output, Plan};
use crate::drafter::Drafter;

/// Buffers of a step.
#[derive(Debug)]
pub(super) struct Packed<'a> {
    target: &'a dflash_target::PackedDecoder,
    draft: Option<PackedDraft<'a>>,
    hidden: usize,
    /// Tokens of a pass `[r]`, and the target's own token after each.
    ids: Vec<i64>,
    own: Vec<i64>,
    /// The residual stream [r, h] of the draft, then of the target.
    x: Vec<f32>,
    /// Auxiliary hidden states [r, k, h].
    features: Vec<f32>,
}

#[derive(Debug)]
struct PackedDraft<'a> {
    rows: &'a dflash_draft::PackedDecoder,
    layer_ids: &'a [u32],
    /// Embeddings of a block's mask tokens [b - 1, h].
    masks: Vec<f32>,
}

/// Maximum rows per pass.
const MOST: usize = dflash_target::PackedDecoder::MAX_ROWS;

impl<'a> Packed<'a> {
    /// `None` unless few rows of both models are packed and a pass can hold a block.
    pub(super) fn new(target: &'a Target, proposer: &Proposer<'a>) -> Option<Self> {
        let rows = target.packed_decoder()?;
        let draft = match proposer.draft() {
            None => None,
            Some(draft) => {
                let config = draft.config();
                let block = config.block();
                if block.rows > MOST.min(dflash_draft::PackedDecoder::MAX_ROWS) {
                    return None;
                }
                let mut masks = vec![0.0; block.masks() * config.hidden_size as usize];
                rows.embed(&vec![config.mask_token_id; block.masks()], &mut masks);
                Some(PackedDraft {
                    rows: draft.packed_decoder()?,
                    layer_ids: &config.target_layer_ids,
                    masks,
                })
            }
        };
        let hidden = target.hidden_size() as usize;
        let aux_layers = draft.as_ref().map_or(0, |draft| draft.layer_ids.len());
        Some(Self {
            target: rows,
            draft,
            hidden,
            ids: vec![0; MOST],
            own: vec![0; MOST],
            x: vec![0.0; MOST * hidden],
            features: vec![0.0; MOST * aux_layers * hidden],
        })
    }

    /// Whether the rows of `plan` fit in a pass.
    pub(super) fn takes(&self, plan: &Plan) -> bool {
        plan.rows() <= MOST
    }

    /// Drafts for `plans`, verifies, and keeps accepted tokens in the caches.
    pub(super) fn step(
        &mut self,
        sequences: &mut [Sequence],
        plans: &mut [Plan],
        target: &Target,
        proposer: &Proposer<'_>,
    ) -> (Vec<Output>, Cost) {
        let began = Instant::now();
        let drafting = plans.iter().filter(|plan| plan.drafted > 0).count();
        if let Some(drafter) = proposer.drafter().filter(|_| drafting > 0) {
            self.propose(sequences, plans, drafter);
        }
        let drafted = Instant::now();
        let rows = plans.iter().map(Plan::rows).sum();
        let mut outputs = Vec::with_capacity(plans.len());
        let mut rest = plans;
        while !rest.is_empty() {
            let (group, others) = rest.split_at_mut(group_length(rest.iter().map(Plan::rows)));
            rest = others;
            self.verify(sequences, group, target, proposer, &mut outputs);
        }
        let verified = Instant::now();
        let overdue = |sequence: &Sequence| self.pending(sequence) >= MOST;
        let overdue: Vec<usize> =
            (0..sequences.len()).filter(|&at| overdue(&sequences[at])).collect();
        self.catch_up(sequences, &overdue);
        let cost = Cost {
            rows,
            drafting,
            verify: (verified - drafted).as_secs_f64(),
            draft: (drafted - began).as_secs_f64(),
        };
        (outputs, cost)
    }

    /// Number of rows missing from the draft's context.
    fn pending(&self, sequence: &Sequence) -> usize {
        let Some(draft) = &self.draft else { return 0 };
        sequence.pending.len() / (draft.layer_ids.len() * self.hidden)
    }

    /// Updates the contexts of the sequences `which`, given in ascending order.
    pub(super) fn catch_up(&mut self, sequences: &mut [Sequence], which: &[usize]) {
        let Some(draft) = &self.draft else { return };
        let width = draft.layer_ids.len() * self.hidden;
        if let [at] = *which {
            let sequence = &mut sequences[at];
            if let Some(cache) = &mut sequence.context {
                for features in sequence.pending.chunks(MOST * width) {
                    let rows = features.len() / width;
                    draft.rows.extend(&mut [ContextPart { cache, rows }], features);
                }
            }
            return sequence.pending.clear();
        }
        // Repeats passes with as many rows of each as fit.
        loop {
            let (mut parts, mut rows) = (Vec::new(), 0);
            let mut wanted = which.iter().copied().peekable();
            for (at, sequence) in sequences.iter_mut().enumerate() {
                if wanted.next_if_eq(&at).is_none() {
                    continue;
                }
                let own = (sequence.pending.len() / width).min(MOST - rows);
                let Some(cache) = sequence.context.as_mut().filter(|_| own > 0) else { continue };
                self.features[rows * width..][..own * width]
                    .copy_from_slice(&sequence.pending[..own * width]);
                sequence.pending.drain(..own * width);
                parts.push(ContextPart { cache, rows: own });
                rows += own;
            }
            if parts.is_empty() {
                return;
            }
            draft.rows.extend(&mut parts, &self.features[..rows * width]);
        }
    }

    /// The draft's proposals for the plans that need some.
    fn propose(&mut self, sequences: &mut [Sequence], plans: &mut [Plan], drafter: &Drafter<'_>) {
        let mut drafting: Vec<&mut Plan> =
            plans.iter_mut().filter(|plan| plan.drafted > 0).collect();
        let which: Vec<usize> = drafting.iter().map(|plan| plan.at).collect();
        self.catch_up(sequences, &which);
        for group in drafting.chunks_mut(MOST / drafter.block().rows) {
            self.propose_together(sequences, group, drafter);
        }
    }

    /// [`Self::propose`] for as many as fit in a pass.
    fn propose_together(
        &mut self,
        sequences: &[Sequence],
        plans: &mut [&mut Plan],
        drafter: &Drafter<'_>,
    ) {
        let draft = self.draft.as_ref().expect("made with the drafter");
        let BlockShape { rows, first_predicting: unread } = drafter.block();
        let (hidden, block, first) = (self.hidden, rows * self.hidden, unread * self.hidden);
        let x = &mut self.x[..plans.len() * block];
        for (plan, x) in plans.iter().zip(x.chunks_mut(block)) {
            let (anchor, masks) = x.split_at_mut(hidden);
            self.target.embed(&plan.ids[..1], anchor);
            masks.copy_from_slice(&draft.masks);
        }
        let context = |plan: &&mut Plan| sequences[plan.at].context.as_ref().expect("it drafts");
        match &*plans {
            [plan] => draft.rows.forward_blocks(&[context(plan)], x, unread),
            plans => {
                let contexts: Vec<_> = plans.iter().map(context).collect();
                draft.rows.forward_blocks(&contexts, x, unread);
            }
        }
        let is_greedy = |plan: &&mut Plan| sequences[plan.at].sampler.is_greedy();
        if !(drafter.draft.head().is_plain() && plans.iter().all(is_greedy)) {
            for (plan, x) in plans.iter_mut().zip(x.chunks(block)) {
                let rows = Tensor::from_slice(&x[first..][..plan.drafted * hidden]);
                let normed_nh = rows.view([-1, hidden as i64]).to_kind(drafter.target.dtype());
                let sequence = &sequences[plan.at];
                let first = sequence.tokens().len();
                let proposed = drafter.choose(&normed_nh, plan.ids[0], &sequence.sampler, first);
                plan.ids.extend(proposed.ids);
                plan.shares = proposed.shares;
            }
            return;
        }
        // Gathers the needed rows.
        let mut rows = 0;
        for (number, plan) in plans.iter().enumerate() {
            let start = number * block + first;
            x.copy_within(start..start + plan.drafted * hidden, rows * hidden);
            rows += plan.drafted;
        }
        let (normed, best) = (&x[..rows * hidden], &mut self.own[..rows]);
        match drafter.pruned.as_ref().and_then(|pruned| pruned.few.as_ref()) {
            Some(pruned) => pruned.most_likely(normed, best),
            None => self.target.most_likely_of_normed(normed, best),
        }
        let mut best = &*best;
        for plan in plans {
            let (own, others) = best.split_at(plan.drafted);
            plan.ids.extend(own);
            best = others;
        }
    }

    /// Runs the target over the tokens of `plans`, few rows in total, and processes its output.
    fn verify(
        &mut self,
        sequences: &mut [Sequence],
        plans: &[Plan],
        target: &Target,
        proposer: &Proposer<'_>,
        outputs: &mut Vec<Output>,
    ) {
        let rows = plans.iter().map(|plan| plan.ids.len()).sum::<usize>();
        let aux_layers = self.draft.as_ref().map_or(&[][..], |draft| draft.layer_ids);
        let width = aux_layers.len() * self.hidden;
        let (mut end, mut before) = (0, Vec::with_capacity(plans.len()));
        for plan in plans {
            self.ids[end..][..plan.ids.len()].copy_from_slice(&plan.ids);
            end += plan.ids.len();
            let sequence = &mut sequences[plan.at];
            before.push(sequence.cache.len());
            sequence.make_room(plan.ids.len(), target, proposer.draft());
        }
        let x = &mut self.x[..rows * self.hidden];
        let mut wanted = plans.iter().peekable();
        let parts = sequences.iter_mut().enumerate().filter_map(|(at, sequence)| {
            let plan = wanted.next_if(|plan| plan.at == at)?;
            Some((&mut sequence.cache, plan.ids.len()))
        });
        let mut parts: Vec<(&mut KvCache, usize)> = parts.collect();
        let states = &mut self.features[..rows * width];
        self.target.forward(&self.ids[..rows], &mut parts, x, aux_layers, states);
        let wants_logits = |plan: &Plan| sequences[plan.at].wants_logits();
        let logits_rv = plans
            .iter()
            .any(wants_logits)
            .then(|| target.logits(&Tensor::from_slice(x).view([rows as i64, self.hidden as i64])));
        let own = &mut self.own[..rows];
        if plans.iter().any(|plan| sequences[plan.at].is_plainly_greedy()) {
            self.target.most_likely(x, own);
        }
        let mut start = 0;
        for (plan, before) in plans.iter().zip(before) {
            let (sequence, rows) = (&mut sequences[plan.at], plan.ids.len());
            let logits_bv =
                logits_rv.as_ref().map(|logits_rv| logits_rv.narrow(0, start as i64, rows as i64));
            let chosen = logits_bv.as_ref().filter(|_| !sequence.is_plainly_greedy());
            let chosen = chosen.map(|bv| sequence.verify(&plan.ids[1..], plan.shares.as_ref(), bv));
            let own = chosen.as_deref().unwrap_or(&own[start..start + rows]);
            let (output, kept) = sequence.take(&plan.ids[1..], own, logits_bv.as_ref());
            sequence.cache.truncate(before + kept);
            if sequence.context.is_some() {
                sequence.pending.extend(&self.features[start * width..(start + kept) * width]);
            }
            outputs.push(output);
            start += rows;
        }
    }
}

/// How many leading entries, at least one, are few rows together.
fn group_length(rows: impl Iterator<Item = usize>) -> usize {
    let mut sum = 0;
    let fit = rows.take_while(|rows| {
        sum += rows;
        sum <= MOST
    });
    fit.count().max(1)
}
