//! The decode loop of `generate`, `serve`, `regenerate`, `eval` and training's validation: it
//! decodes sequences together, with or without proposals, in one pass of the target per step.
//!
//! A [`Request`] becomes a `Sequence` with its own caches, sampler and limits. A step chooses how
//! many tokens to propose for each sequence that has read its prompt (`lengths`), looks them up or
//! drafts them, adds the next pieces of prompts that are still being read, verifies, keeps each
//! sequence's proposals that the target would have generated itself, and truncates the caches.
//! Attention and sampling are per sequence, so its text depends on the others only through rounding
//! in larger products. A step has two equivalent implementations: packed layers on a CPU (`packed`)
//! and libtorch operations otherwise (`tensors`); both use the same code to compare proposals with
//! the target's tokens. A prompt with the same beginning as another sequence, running or recently
//! ended (`prefixes`), starts from a copy of its cache.
//!
//! Sampled tokens are verified in one of two ways. If the number of proposals depends on measured
//! times, texts must not: a token's random numbers depend only on seed and position, target and
//! draft draw with the same ones, and a differing proposal is rejected. If the number is fixed,
//! rejection sampling accepts more, as in other engines, and the text depends on the draft.

mod lengths;
mod packed;
mod prefixes;
mod proposer;
mod request;
mod sequence;
mod tensors;
mod timing;

use dflash_draft::{ContextCache, Draft};
use dflash_settings::Speculate;
use dflash_target::{KvCache, Target};
use dflash_tensor::catch_oom;
use tch::{Tensor, no_grad};

use self::lengths::{Choice, Lengths};
use self::packed::Packed;
use self::prefixes::{Prefixes, common, usable};
use self::proposer::Proposer;
use self::sequence::{Sequence, empty_caches, first_capacity};
use self::tensors::Turn;
use crate::Error;
use crate::sampling::AcceptanceRule;

pub use self::proposer::Proposals;
pub use self::request::{
    Block, EngineOptions, Finish, Logprob, NewToken, Output, Request, SequenceId,
};

/// Minimum number of common tokens worth copying.
const LEAST_REUSE: usize = 16;
/// Limit of cache memory kept from ended sequences for reuse: requesting the same pages again from
/// the operating system takes as long as many steps of a small target.
const SPARE_BYTES: usize = 64 << 20;

/// Decodes sequences together.
#[derive(Debug)]
pub struct Engine<'a> {
    target: &'a Target,
    proposer: Proposer<'a>,
    lengths: Lengths,
    packed: Option<Packed<'a>>,
    options: EngineOptions,
    /// In order of arrival.
    sequences: Vec<Sequence>,
    /// Suspended sequences, which take part in no step and occupy no place.
    resting: Vec<Sequence>,
    prefixes: Prefixes,
    /// Empty caches of ended sequences, for reuse.
    spare: Vec<(KvCache, Option<ContextCache>)>,
    next_id: u64,
}

/// Work of one step for a sequence past its prompt.
#[derive(Debug)]
struct Plan {
    /// Index of the sequence.
    at: usize,
    /// Its last token, which is not cached yet, and the proposals after it.
    ids: Vec<i64>,
    /// Number of tokens to draft.
    drafted: usize,
    /// The distributions [drafted, V] of the proposals, if verification needs them.
    shares: Option<Tensor>,
}

impl Plan {
    /// Rows in the target's pass.
    fn rows(&self) -> usize {
        // Drafted tokens are added once they are known.
        self.ids.len().max(1 + self.drafted)
    }
}

impl<'a> Engine<'a> {
    /// Creates an engine for `target` with a proposer. If the number of proposals is chosen
    /// automatically, it times a few passes.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if draft and target differ in size or vocabulary size; a layer id or
    /// mask token that the target does not have; [`Error::LongBlock`]; [`Error::OutOfMemory`].
    pub fn new(
        target: &'a Target,
        proposals: Proposals<'a>,
        options: EngineOptions,
    ) -> Result<Self, Error> {
        let proposals = match options.speculate {
            Speculate::Off => Proposals::None,
            _ => proposals,
        };
        let proposer = Proposer::new(target, proposals)?;
        let drafts = proposer.drafter().is_some();
        let mut engine = Self {
            target,
            lengths: Lengths::new(options.speculate, proposer.most(), drafts),
            packed: Packed::new(target, &proposer),
            proposer,
            options,
            sequences: Vec::new(),
            resting: Vec::new(),
            prefixes: Prefixes::new(options.prefix_bytes),
            spare: Vec::new(),
            next_id: 0,
        };
        if engine.lengths.is_auto() && engine.lengths.most() > 0 {
            engine.time_passes()?;
        }
        Ok(engine)
    }

    /// Number of active sequences.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Whether there is no active sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Whether another sequence may be added.
    pub fn has_room(&self) -> bool {
        self.len() < self.options.max_sequences
    }

    /// Maximum proposals per block; 0 without a proposer.
    pub fn proposals(&self) -> usize {
        self.lengths.most()
    }

    /// Predicted seconds of a step of `sequences` sequences with 0, 1, ... proposals each, from the
    /// passes so far; empty if the number of proposals is not chosen automatically.
    pub fn step_seconds(&self, sequences: usize) -> Vec<f64> {
        self.lengths.step_seconds(sequences)
    }

    /// Bytes of keys and values: of sequences, and of retained finished ones.
    pub fn cache_bytes(&self) -> (usize, usize) {
        let held = self.sequences.iter().chain(&self.resting);
        (held.map(Sequence::cache_bytes).sum(), self.prefixes.bytes())
    }

    /// Adds a sequence, whose output [`Self::step`] returns.
    ///
    /// # Panics
    /// If there is no room, the prompt is empty, or prompt and answer together exceed the maximum
    /// sequence length: bugs of the caller.
    pub fn add(&mut self, request: Request) -> SequenceId {
        let (prompt, new) = (request.prompt.len(), request.max_new_tokens);
        assert!(self.has_room(), "{} sequences are all that fit", self.options.max_sequences);
        assert!(prompt > 0, "a sequence has a prompt");
        let most = self.options.max_model_len;
        assert!(
            prompt + new <= most,
            "{prompt} and {new} tokens exceed the longest sequence, {most}"
        );
        let id = SequenceId::numbered(self.next_id);
        self.next_id += 1;
        // Drafting does not affect the text.
        let drafts = request.speculative && self.lengths.is_worth_context(self.len() + 1);
        let request = Request { speculative: drafts, ..request };
        // If memory is short, the pass fails instead and can drop its sequences.
        let caches = catch_oom(|| self.new_caches(&request));
        let draft = self.proposer.draft().filter(|_| request.speculative);
        let caches = caches.unwrap_or_else(|_| empty_caches(self.target, draft, 0));
        let rule = match draft.is_some() && !self.lengths.is_auto() {
            true => AcceptanceRule::Rejection,
            // Lengths chosen by timing must not affect the text.
            false => AcceptanceRule::Coupled,
        };
        let (cache, context) = caches;
        let mut sequence = Sequence::new(id, request, self.target, cache, context);
        sequence.sampler = sequence.sampler.accepting_by(rule);
        self.sequences.push(sequence);
        id
    }

    /// Drops a sequence. No effect if it has ended.
    pub fn remove(&mut self, id: SequenceId) {
        if let Some(at) = self.sequences.iter().position(|sequence| sequence.id == id) {
            let sequence = self.sequences.remove(at);
            self.retire(sequence);
        } else if let Some(at) = self.resting.iter().position(|sequence| sequence.id == id) {
            let sequence = self.resting.remove(at);
            self.retire(sequence);
        }
    }

    /// Suspends a sequence and frees its place. Its caches stay, so its text is unaffected.
    pub fn rest(&mut self, id: SequenceId) {
        if let Some(at) = self.sequences.iter().position(|sequence| sequence.id == id) {
            self.resting.push(self.sequences.remove(at));
        }
    }

    /// Resumes a suspended sequence.
    ///
    /// # Panics
    /// If there is no room: a bug of the caller.
    pub fn wake(&mut self, id: SequenceId) {
        assert!(self.has_room(), "{} sequences are all that fit", self.options.max_sequences);
        if let Some(at) = self.resting.iter().position(|sequence| sequence.id == id) {
            self.sequences.push(self.resting.remove(at));
        }
    }

    /// Empty caches for a sequence; reuses those of an ended one if large enough.
    fn new_caches(&mut self, request: &Request) -> (KvCache, Option<ContextCache>) {
        let capacity = first_capacity(request, request.prompt.len());
        let draft = self.proposer.draft().filter(|_| request.speculative);
        let fits = |(cache, context): &(KvCache, Option<ContextCache>)| {
            cache.capacity() >= capacity && context.is_some() == draft.is_some()
        };
        match self.spare.iter().position(fits) {
            Some(at) => self.spare.swap_remove(at),
            None => empty_caches(self.target, draft, capacity),
        }
    }

    /// Keeps an ended sequence's caches: a prefix copy for later prompts, and the emptied memory.
    fn retire(&mut self, mut sequence: Sequence) {
        if let Some(packed) = self.packed.as_mut().filter(|_| self.options.prefix_bytes > 0) {
            packed.catch_up(std::slice::from_mut(&mut sequence), &[0]);
        }
        keep_caches(&mut self.prefixes, &sequence, self.target, self.proposer.draft());
        let bytes = |(cache, context): &(KvCache, Option<ContextCache>)| {
            cache.bytes() + context.as_ref().map_or(0, ContextCache::bytes)
        };
        let (mut cache, mut context) = sequence.into_caches();
        cache.truncate(0);
        if let Some(context) = &mut context {
            context.truncate(0);
        }
        self.spare.push((cache, context));
        while self.spare.iter().map(bytes).sum::<usize>() > SPARE_BYTES {
            self.spare.remove(0);
        }
    }

    /// One pass of the target, and of the draft if it proposes. Returns the output of every
    /// sequence with new tokens; nothing while prompts are being read.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]: then every sequence is dropped, including suspended ones and
    /// retained caches.
    pub fn step(&mut self) -> Result<Vec<Output>, Error> {
        let sequences = self.len();
        catch_oom(|| self.pass()).map_err(|reason| {
            // The pass may have stopped anywhere, so the caches' content is unknown.
            self.sequences.clear();
            self.resting.clear();
            self.prefixes.clear();
            self.spare.clear();
            Error::OutOfMemory { sequences, reason }
        })
    }

    fn pass(&mut self) -> Vec<Output> {
        no_grad(|| {
            let mut choices = self.ready();
            self.lengths.choose(&mut choices);
            let plans: Vec<Plan> = choices.iter().map(|choice| self.plan(choice)).collect();
            let prompts = self.prefill_turns();
            let reading: Vec<usize> = prompts.iter().map(|turn| turn.at).collect();
            let outputs = self.run(plans, prompts);
            for choice in choices {
                let sequence = &mut self.sequences[choice.at];
                let (proposed, accepted) = sequence.verified;
                self.lengths.verified(&mut sequence.acceptance, &choice, proposed, accepted);
            }
            self.keep_stopped(&reading);
            let ended: Vec<SequenceId> =
                outputs.iter().filter(|out| out.finish.is_some()).map(|out| out.id).collect();
            ended.into_iter().for_each(|id| self.remove(id));
            outputs
        })
    }

    /// The sequences that are past their prompts.
    fn ready(&self) -> Vec<Choice> {
        let ready = self.sequences.iter().enumerate().filter(|(_, one)| one.bonus().is_some());
        let choice = |(at, sequence): (usize, &Sequence)| {
            let most = match sequence.speculative {
                true => self.proposer.most_behind(sequence.tokens()),
                false => 0,
            };
            // The last tokens need fewer proposals; fixed lengths and their statistics stay as set.
            let most = if self.lengths.is_auto() { most.min(sequence.room() - 1) } else { most };
            Choice { at, acceptance: sequence.acceptance, most, proposals: 0, saving: 0.0 }
        };
        ready.map(choice).collect()
    }

    fn plan(&self, choice: &Choice) -> Plan {
        let Choice { at, proposals, .. } = *choice;
        let tokens = self.sequences[at].tokens();
        let mut ids = Vec::with_capacity(1 + proposals);
        ids.extend(tokens.last());
        ids.extend(self.proposer.looked_up(tokens, proposals));
        let drafted = if self.proposer.drafter().is_some() { proposals } else { 0 };
        Plan { at, ids, drafted, shares: None }
    }

    /// Executes `plans` and reads pieces of prompts.
    fn run(&mut self, plans: Vec<Plan>, prompts: Vec<Turn>) -> Vec<Output> {
        let (target, proposer) = (self.target, &self.proposer);
        let is_few = |plan: &Plan| self.packed.as_ref().is_some_and(|packed| packed.takes(plan));
        let (mut few, many): (Vec<Plan>, Vec<Plan>) = plans.into_iter().partition(is_few);
        let mut outputs = Vec::new();
        if let Some(packed) = self.packed.as_mut().filter(|_| !few.is_empty()) {
            let (made, cost) = packed.step(&mut self.sequences, &mut few, target, proposer);
            self.lengths.timed(cost);
            outputs = made;
        }
        if !(many.is_empty() && prompts.is_empty()) {
            let has_prompts = !prompts.is_empty();
            let sequences = &mut self.sequences;
            let (made, cost) = tensors::step(sequences, &many, prompts, target, proposer);
            if !has_prompts {
                self.lengths.timed(cost);
            }
            outputs.extend(made);
        }
        outputs
    }

    /// Keeps the caches of sequences that have reached the end of a prefix shared with others.
    fn keep_stopped(&mut self, reading: &[usize]) {
        for &at in reading {
            let sequence = &self.sequences[at];
            if sequence.is_at_stop() {
                keep_caches(&mut self.prefixes, sequence, self.target, self.proposer.draft());
            }
        }
    }

    /// The next pieces of prompts within a step's budget. Prompts with the fewest remaining tokens
    /// come first, and each gets at most an equal share of the rest, so that a short prompt does
    /// not wait for longer ones before it.
    fn prefill_turns(&mut self) -> Vec<Turn> {
        let left = |one: &Sequence| one.prompt_tokens().saturating_sub(one.cache.len());
        let mut reading = Vec::new();
        for at in 0..self.len() {
            if self.sequences[at].bonus().is_none() && self.begin(at) {
                reading.push((left(&self.sequences[at]), at));
            }
        }
        reading.sort_unstable();
        let mut budget = self.options.prefill_tokens;
        let mut turns = Vec::new();
        let mut readers = reading.len();
        for (_, at) in reading {
            let share = budget.div_ceil(readers);
            readers -= 1;
            if share == 0 {
                break;
            }
            let sequence = &self.sequences[at];
            let piece = sequence.next_piece(share);
            budget = budget.saturating_sub(piece.len());
            let end = sequence.cache.len() + piece.len();
            let is_last = end == sequence.prompt_tokens();
            turns.push(Turn::of_prompt(at, piece, is_last, self.target));
        }
        turns
    }

    /// Before a prompt's first piece: copies the prefix that another sequence has cached. Returns
    /// false while an earlier sequence is still reading more of it than can be copied now.
    ///
    /// If layers carry a state, caches can only be copied at few lengths. If the other sequence has
    /// not yet reached the point where the prompts diverge, it stops there; otherwise this one
    /// does, and its caches are kept for the next.
    fn begin(&mut self, at: usize) -> bool {
        if self.sequences[at].begun || self.sequences[at].is_whole {
            return true;
        }
        if let Some((other, rows)) = self.worth_waiting(at) {
            if self.target.carries_state() {
                self.sequences[other].stop_at(rows);
            }
            return false;
        }
        let (sequences, sequence) = (&self.sequences, &self.sequences[at]);
        // At least the last token is read, since its state gives the answer's first token.
        let prompt = &sequence.tokens()[..sequence.prompt_tokens() - 1];
        let drafts = sequence.context.is_some();
        let others = || sequences.iter().filter(|other| other.id != sequence.id && !other.is_whole);
        let held = |other: &Sequence| common(prompt, &other.tokens()[..other.cached_rows(drafts)]);
        let known =
            others().map(held).max().unwrap_or(0).max(self.prefixes.longest(prompt, drafts));
        let best_live = others().map(|other| (usable(held(other), &other.cache), other));
        let best_live = best_live.max_by_key(|(rows, _)| *rows);
        let best_kept = self.prefixes.find(prompt, drafts);
        let live_rows = best_live.as_ref().map_or(0, |(rows, _)| *rows);
        let kept_rows = best_kept.as_ref().map_or(0, |(rows, _)| *rows);
        let rows = live_rows.max(kept_rows);
        if rows >= LEAST_REUSE {
            let draft = self.proposer.draft();
            let (cache, context) = match (best_live, best_kept) {
                (Some((live, other)), _) if live >= kept_rows => other.caches(),
                (_, Some((_, entry))) => entry.caches(),
                _ => unreachable!("one of them has these rows"),
            };
            let capacity = sequence.first_capacity();
            let copy = self.target.copy_cache(cache, rows, capacity);
            let context = draft
                .zip(context)
                .filter(|_| drafts)
                .map(|(draft, context)| draft.copy_cache(context, rows as i64, capacity as i64));
            self.sequences[at].start_from(copy, context);
        }
        if self.target.carries_state() && known >= rows + LEAST_REUSE {
            self.sequences[at].stop_at(known);
        }
        self.sequences[at].begun = true;
        true
    }

    /// An earlier sequence that is reading a longer common prefix than can be copied now, and the
    /// length of that prefix.
    fn worth_waiting(&mut self, at: usize) -> Option<(usize, usize)> {
        let (sequences, sequence) = (&self.sequences, &self.sequences[at]);
        let prompt = &sequence.tokens()[..sequence.prompt_tokens() - 1];
        let drafts = sequence.context.is_some();
        let others = sequences.iter().filter(|other| other.id != sequence.id && !other.is_whole);
        let held = |other: &Sequence| {
            usable(common(prompt, &other.tokens()[..other.cached_rows(drafts)]), &other.cache)
        };
        let live_rows = others.map(held).max().unwrap_or(0);
        let kept_rows = self.prefixes.find(prompt, drafts).map_or(0, |(rows, _)| rows);
        let reading = |other: &Sequence| {
            other.bonus().is_none() && !other.is_whole && (other.context.is_some() || !drafts)
        };
        let (other, shared) = sequences[..at]
            .iter()
            .enumerate()
            .filter(|(_, other)| reading(other))
            .map(|(number, other)| {
                let shared = common(prompt, &other.tokens()[..other.prompt_tokens()]);
                // Tokens read beyond the prefix are already in its caches as far as they can be
                // copied.
                (number, if other.cache.len() <= shared { shared } else { 0 })
            })
            .max_by_key(|(_, shared)| *shared)?;
        (shared >= live_rows.max(kept_rows) + LEAST_REUSE).then_some((other, shared))
    }
}

/// Keeps a sequence's caches as a prefix for later prompts.
fn keep_caches(
    prefixes: &mut Prefixes,
    sequence: &Sequence,
    target: &Target,
    draft: Option<&Draft>,
) {
    if sequence.is_whole {
        return;
    }
    let (cache, context) = sequence.caches();
    let keep = || no_grad(|| prefixes.insert(sequence.held(), cache, context, target, draft));
    // If there is no memory for a copy, the others are dropped too.
    if catch_oom(keep).is_err() {
        prefixes.clear();
    }
}
