//! One sequence: its tokens, caches, sampler and limits.

use std::collections::BTreeSet;

use dflash_draft::{ContextCache, Draft};
use dflash_target::{KvCache, Target};
use tch::{Kind, Tensor};

use super::lengths::Acceptance;
use super::{Block, Finish, Logprob, NewToken, Output, Request, SequenceId};
use crate::adjust::Adjuster;
use crate::drafter::to_host;
use crate::limits::roomy;
use crate::sampling::Sampler;

/// Answer tokens that the first cache has room for; capacity doubles as the answer grows.
const FIRST_ANSWER: usize = 256;

/// Prompt rows whose logits are computed at once; about 60 MB for a large vocabulary.
const PROMPT_ROWS: usize = 32;

/// A prompt and its answer so far.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    request: Request,
    pub(super) sampler: Sampler,
    /// If the request changes logits.
    adjuster: Option<Adjuster>,
    /// Prompt and accepted answer tokens. Once the prompt is read, all except the last, the bonus
    /// token, are in the caches.
    tokens: Vec<i64>,
    /// Start of the answer.
    prompt: usize,
    pub(super) cache: KvCache,
    /// The draft's context, if the sequence drafts.
    pub(super) context: Option<ContextCache>,
    /// Auxiliary hidden states of accepted tokens not yet in the draft's context; processed with
    /// the next block, so steps without one save the pass.
    pub(super) pending: Vec<f32>,
    /// Whether tokens may be proposed, and recent acceptance.
    pub(super) speculative: bool,
    pub(super) acceptance: Acceptance,
    /// Number of proposals of the last step, and of accepted ones.
    pub(super) verified: (usize, usize),
    /// Log-probabilities of the prompt to report.
    prompt_logprobs: Vec<Logprob>,
    /// Whether reading the prompt has begun.
    pub(super) begun: bool,
    /// Whether the prompt must be read in one pass and cannot share rows: its length selects other
    /// rotary frequencies than shorter prompts.
    pub(super) is_whole: bool,
    /// Where pieces of the prompt must end so that the caches can be copied there, i.e. where other
    /// prompts diverge. Used only if layers carry a state.
    stops: BTreeSet<usize>,
    cached_tokens: usize,
}

impl Sequence {
    pub(super) fn new(
        id: SequenceId,
        mut request: Request,
        target: &Target,
        cache: KvCache,
        context: Option<ContextCache>,
    ) -> Self {
        let tokens = std::mem::take(&mut request.prompt);

        let is_whole = target.longest_in_pieces().is_some_and(|longest| tokens.len() > longest);
        Self {
            id,
            sampler: Sampler::new(request.sampling, request.seed),
            adjuster: Adjuster::new(
                std::mem::take(&mut request.adjustments),
                request.grammar.take(),
                &tokens,
                &request.stop_ids,
            ),
            prompt: tokens.len(),
            tokens,
            cache,
            context,
            pending: Vec::new(),
            speculative: request.speculative,
            // Copied rows give no logits.
            begun: request.prompt_logprobs,
            prompt_logprobs: Vec::new(),
            request,
            acceptance: Acceptance::default(),
            verified: (0, 0),
            is_whole,
            stops: BTreeSet::new(),
            cached_tokens: 0,
        }
    }

    pub(super) fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompt
    }

    /// The last token, which is not cached yet; `None` while the prompt is being read.
    pub(super) fn bonus(&self) -> Option<i64> {
        self.tokens[self.prompt..].last().copied()
    }

    /// Number of copyable rows; if `drafts`, the draft's cache must have them too.
    pub(super) fn cached_rows(&self, drafts: bool) -> usize {
        match (&self.context, drafts) {
            (_, false) => self.cache.len(),
            (Some(context), true) => self.cache.len().min(context.len() as usize),
            (None, true) => 0,
        }
    }

    pub(super) fn caches(&self) -> (&KvCache, Option<&ContextCache>) {
        (&self.cache, self.context.as_ref())
    }

    pub(super) fn into_caches(self) -> (KvCache, Option<ContextCache>) {
        (self.cache, self.context)
    }

    /// The tokens in the target's cache.
    pub(super) fn held(&self) -> &[i64] {
        &self.tokens[..self.cache.len().min(self.tokens.len())]
    }

    /// Makes a piece of the prompt end after `tokens` tokens.
    pub(super) fn stop_at(&mut self, tokens: usize) {
        self.stops.insert(tokens);
    }

    /// Whether the caches have reached a length to keep for other prompts.
    pub(super) fn is_at_stop(&self) -> bool {
        self.stops.contains(&self.cache.len())
    }

    /// The next prompt tokens, at most `most`; all if the prompt is read in one pass.
    pub(super) fn next_piece(&self, most: usize) -> &[i64] {
        if self.is_whole {
            return &self.tokens[..self.prompt];
        }
        let start = self.cache.len();
        let stop = self.stops.range(start + 1..).next().copied().unwrap_or(self.prompt);
        &self.tokens[start..self.prompt.min(stop).min(start + most)]
    }

    pub(super) fn cache_bytes(&self) -> usize {
        self.cache.bytes() + self.context.as_ref().map_or(0, ContextCache::bytes)
    }

    /// Initial capacity of the sequence.
    pub(super) fn first_capacity(&self) -> usize {
        first_capacity(&self.request, self.prompt)
    }

    /// Number of tokens that the answer may still have.
    pub(super) fn room(&self) -> usize {
        self.request.max_new_tokens - (self.tokens.len() - self.prompt)
    }

    /// Whether logits are needed, rather than only the argmax.
    pub(super) fn wants_logits(&self) -> bool {
        !self.is_plainly_greedy() || self.request.logprobs.is_some()
    }

    /// Whether its tokens are the argmax of the unmodified logits.
    pub(super) fn is_plainly_greedy(&self) -> bool {
        self.sampler.is_greedy() && self.adjuster.is_none()
    }

    /// The target's tokens given its logits [n + 1, V] after the last token and after each of `n`
    /// proposals, which were drawn from `draft_nv` if that matters. Returns as many as are certain.
    pub(super) fn verify(
        &mut self,
        proposed: &[i64],
        draft_nv: Option<&Tensor>,
        logits_bv: &Tensor,
    ) -> Vec<i64> {
        let adjusted_bv =
            self.adjuster.as_mut().map(|adjuster| adjuster.adjusted(logits_bv, proposed));
        let logits_bv = adjusted_bv.as_ref().unwrap_or(logits_bv);
        self.sampler.verify(proposed, draft_nv, logits_bv, self.tokens.len())
    }

    /// Collects the prompt's log-probabilities from states [T, H] of its tokens starting at
    /// position `first`; each state predicts the next token.
    pub(super) fn read_prompt(&mut self, states_th: &Tensor, first: usize, target: &Target) {
        let Some(top) = self.request.logprobs.filter(|_| self.request.prompt_logprobs) else {
            return;
        };
        let last = self.prompt.min(first + 1 + states_th.size()[0] as usize);
        let told = self.tokens.get(first + 1..last).unwrap_or_default();
        for (number, ids) in told.chunks(PROMPT_ROWS).enumerate() {
            let rows_th = states_th.narrow(0, (number * PROMPT_ROWS) as i64, ids.len() as i64);
            self.prompt_logprobs.extend(logprobs_of(ids, top, &target.logits(&rows_th)));
        }
    }

    /// Starts from the copied caches of another sequence with the same prefix.
    pub(super) fn start_from(&mut self, cache: KvCache, context: Option<ContextCache>) {
        self.cached_tokens = cache.len();
        (self.cache, self.context) = (cache, context);
    }

    /// Makes room for `tokens` more in both caches.
    pub(super) fn make_room(&mut self, tokens: usize, target: &Target, draft: Option<&Draft>) {
        let (held, needed) = (self.cache.len(), self.cache.len() + tokens);
        if needed <= self.cache.capacity() {
            return;
        }
        let capacity = roomy(needed.max(2 * self.cache.capacity()).max(self.first_capacity()));
        self.cache = target.copy_cache(&self.cache, held, capacity);
        if let Some((context, draft)) = self.context.as_mut().zip(draft) {
            *context = draft.copy_cache(context, context.len(), capacity as i64);
        }
    }

    /// Accepts proposed tokens while they equal the target's `own` (one more than proposed), plus
    /// the next one of those. Also returns how many tokens that is. `logits_bv` has one row per
    /// token in `own`; it is required unless plain greedy tokens suffice.
    pub(super) fn take(
        &mut self,
        proposed: &[i64],
        own: &[i64],
        logits_bv: Option<&Tensor>,
    ) -> (Output, usize) {
        let accepted = proposed.iter().zip(own).take_while(|(proposal, own)| proposal == own);
        let accepted = accepted.count();
        let tokens = &own[..=accepted];
        let room = self.room();
        let ends = |id: &i64| self.request.stop_ids.contains(id);
        let stop = tokens.iter().take(room).position(ends);
        let has_failed = self.adjuster.as_ref().is_some_and(Adjuster::has_failed);
        let said = stop.map_or(tokens.len().min(room), |at| at + 1);
        let said = if has_failed { 0 } else { said };
        let finish = match stop {
            // These tokens were chosen without the grammar.
            _ if has_failed => Some(Finish::Grammar),
            Some(_) => Some(Finish::Stop),
            None => (said == room).then_some(Finish::Length),
        };
        let logprobs = self.request.logprobs.zip(logits_bv);
        let logprobs =
            logprobs.map(|(top, logits_bv)| logprobs_of(&tokens[..said], top, logits_bv));
        let logprob = |at: usize| logprobs.as_ref().map(|logprobs| logprobs[at].clone());
        let new = tokens[..said].iter().enumerate();
        let new = new.map(|(at, &id)| NewToken { id, logprob: logprob(at) }).collect();
        self.tokens.extend(tokens);
        if let Some(adjuster) = &mut self.adjuster {
            adjuster.take(tokens);
        }
        self.verified = (proposed.len(), accepted);
        let proposed = proposed.to_vec();
        let block = (!proposed.is_empty()).then_some(Block { proposed, accepted });
        let (id, cached_tokens) = (self.id, self.cached_tokens);
        let prompt = std::mem::take(&mut self.prompt_logprobs);
        (Output { id, tokens: new, prompt, block, finish, cached_tokens }, tokens.len())
    }
}

/// Caches with capacity for `tokens`; also the draft's if there is one.
pub(super) fn empty_caches(
    target: &Target,
    draft: Option<&Draft>,
    capacity: usize,
) -> (KvCache, Option<ContextCache>) {
    (target.new_cache(capacity), draft.map(|draft| draft.new_cache(capacity as i64)))
}

/// Initial capacity of a sequence.
pub(super) fn first_capacity(request: &Request, prompt: usize) -> usize {
    roomy(prompt + request.max_new_tokens.min(FIRST_ANSWER))
}

/// Log-probabilities of `tokens`, one for each of the first rows of logits [B, V].
fn logprobs_of(tokens: &[i64], top: usize, logits_bv: &Tensor) -> Vec<Logprob> {
    let rows = tokens.len() as i64;
    let log_bv = logits_bv.narrow(0, 0, rows).log_softmax(-1, Kind::Double);
    let ids_b1 = Tensor::from_slice(tokens).to_device(log_bv.device()).unsqueeze(1);
    let chosen = floats(&log_bv.gather(1, &ids_b1, false));
    let top = (top as i64).min(log_bv.size()[1]);
    let (values_bt, ids_bt) = log_bv.topk(top, -1, true, true);
    let (values, ids) = (floats(&values_bt), to_host(&ids_bt.flatten(0, -1)));
    let best = |row: usize| {
        let range = row * top as usize..(row + 1) * top as usize;
        ids[range.clone()].iter().copied().zip(values[range].iter().copied()).collect()
    };
    chosen.iter().enumerate().map(|(row, &chosen)| Logprob { chosen, top: best(row) }).collect()
}

fn floats(values: &Tensor) -> Vec<f64> {
    Vec::try_from(values.flatten(0, -1)).expect("logarithms are float64")
}
