//! Greedy steps on a CPU where few rows are packed: buffers that are made once, and no tensors.

use dflash_model::draft::{self, ContextCache};
use dflash_model::target::{self, KvCache};

use crate::drafter::{Drafter, PrunedHead};

/// The most likely token, a step of plain decoding.
#[derive(Debug)]
pub(crate) struct FewRowsPlain<'a> {
    target: &'a target::FewRows,
    /// The residual stream `[H]`.
    x: Vec<f32>,
}

impl<'a> FewRowsPlain<'a> {
    pub(crate) fn new(target: &'a target::Target) -> Option<Self> {
        let few = target.few_rows()?;
        Some(Self { target: few, x: vec![0.0; target.hidden_size() as usize] })
    }

    /// Appends `id` to the sequence and chooses the token after it.
    pub(crate) fn next(&mut self, id: i64, cache: &mut KvCache) -> i64 {
        let mut best = [0];
        self.target.forward((&[id], cache), &mut self.x, (&[], &mut []));
        self.target.most_likely(&self.x, &mut best);
        best[0]
    }
}

/// A step of speculative decoding. Shapes: `b` slots of a block, `k` layers that the draft looks at, `h`
/// hidden.
#[derive(Debug)]
pub(crate) struct FewRowsSteps<'a> {
    target: &'a target::FewRows,
    draft: &'a draft::FewRows,
    layer_ids: &'a [u32],
    hidden: usize,
    /// The bonus token and the proposals behind it `[b]`.
    ids: Vec<i64>,
    /// The target's own token after each of these `[b]`.
    own: Vec<i64>,
    /// Embeddings of the mask tokens [b - 1, h].
    masks: Vec<f32>,
    /// The residual stream [b, h] of the draft, then of the target.
    x: Vec<f32>,
    /// What the draft looks at [b, k, h].
    features: Vec<f32>,
}

impl<'a> FewRowsSteps<'a> {
    /// Buffers for blocks of the drafter's size, where both models' few rows are packed and take so many.
    pub(crate) fn new(drafter: &Drafter<'a>) -> Option<Self> {
        let (target, draft) = (drafter.target.few_rows()?, drafter.draft.few_rows()?);
        let (slots, config) = (drafter.block_size(), drafter.draft.config());
        if slots > target::FewRows::MAX_ROWS.min(draft::FewRows::MAX_ROWS) {
            return None;
        }
        let (hidden, layer_ids) = (config.hidden_size as usize, &config.target_layer_ids);
        let mut masks = vec![0.0; (slots - 1) * hidden];
        target.embed(&vec![config.mask_token_id; slots - 1], &mut masks);
        Some(Self {
            target,
            draft,
            layer_ids,
            hidden,
            ids: vec![0; slots],
            own: vec![0; slots],
            masks,
            x: vec![0.0; slots * hidden],
            features: vec![0.0; slots * layer_ids.len() * hidden],
        })
    }

    /// Drafts a block behind `bonus`, verifies it, and keeps what is accepted in both caches. Returns the
    /// step's tokens: the accepted proposals, and the target's own after them.
    pub(crate) fn step(
        &mut self,
        bonus: i64,
        head: Option<&PrunedHead>,
        (cache, context): (&mut KvCache, &mut ContextCache),
    ) -> &[i64] {
        self.propose(bonus, head, context);
        let anchor = cache.len();
        let states = (self.layer_ids, self.features.as_mut_slice());
        self.target.forward((&self.ids, cache), &mut self.x, states);
        self.target.most_likely(&self.x, &mut self.own);
        let agreed = self.ids[1..].iter().zip(&self.own).take_while(|(id, own)| id == own);
        let kept = agreed.count() + 1;
        cache.truncate(anchor + kept);
        self.draft.extend(context, &self.features[..kept * self.layer_ids.len() * self.hidden]);
        &self.own[..kept]
    }

    fn propose(&mut self, bonus: i64, head: Option<&PrunedHead>, context: &ContextCache) {
        let (anchor, masks) = self.x.split_at_mut(self.hidden);
        self.target.embed(&[bonus], anchor);
        masks.copy_from_slice(&self.masks);
        self.draft.forward_block(context, &mut self.x, 1);
        let normed = &self.x[self.hidden..];
        self.ids[0] = bonus;
        match head.and_then(|head| head.few.as_ref()) {
            Some(pruned) => pruned.most_likely(normed, &mut self.ids[1..]),
            None => self.target.most_likely_of_normed(normed, &mut self.ids[1..]),
        }
    }
}
