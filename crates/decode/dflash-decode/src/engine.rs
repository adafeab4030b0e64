//! The decode loop of `generate`, `serve`, `regenerate`, `eval` and training's validation: it
//! decodes sequences together, with or without proposals, in one pass of the target per step.
//!
//! A [`Request`] becomes a `Sequence` with its own caches, sampler and limits. A step chooses how
//! many tokens to propose for each sequence that has read its prompt (`lengths`), looks them up or
//! drafts them, takes the next piece of the prompts that are still being read, verifies, keeps the
//! proposals of each sequence that the target would have emitted itself, and truncates the caches.
//! Attention and sampling are per sequence, so its text depends on the others only through rounding
//! in larger products. A step has two forms with the same meaning: packed layers on a CPU
//! (`packed`) and libtorch's operations otherwise (`tensors`); both end in the same code that
//! compares proposals with the target's tokens. A prompt that begins like another sequence, running
//! or recently ended (`prefixes`), starts from a copy of its cache.
//!
//! There are two ways to verify sampled tokens. Where lengths depend on measured times, texts must
//! not: a token's random numbers depend only on the seed and the position, target and draft draw
//! with the same ones, and a differing proposal is rejected. Where lengths are fixed, rejection
//! sampling accepts more, as in other engines, and the text depends on the draft.

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

/// Fewer tokens than this are not worth a copy.
const LEAST_REUSE: usize = 16;
/// Memory of ended sequences' caches that is kept for the next ones: to ask the operating system for the
/// same pages again takes as long as many steps of a small target.
const SPARE_BYTES: usize = 64 << 20;

/// Decodes sequences together.
#[derive(Debug)]
pub struct Engine<'a> {
    target: &'a Target,
    proposer: Proposer<'a>,
    lengths: Lengths,
    packed: Option<Packed<'a>>,
    options: EngineOptions,
    /// In the order in which they came.
    sequences: Vec<Sequence>,
    /// Sequences that rest: no step is theirs, and they take no place.
    resting: Vec<Sequence>,
    prefixes: Prefixes,
    /// Caches of ended sequences, emptied, for the next ones.
    spare: Vec<(KvCache, Option<ContextCache>)>,
    next_id: u64,
}

/// A sequence that is past its prompt, before its step.
#[derive(Debug)]
struct Plan {
    /// Which sequence.
    at: usize,
    /// Its last token, which no cache holds yet, and what is proposed behind it.
    ids: Vec<i64>,
    /// How many tokens a draft is to propose.
    drafted: usize,
    /// The distributions [drafted, V] that these were drawn from, where their verification asks for them.
    shares: Option<Tensor>,
}

impl Plan {
    /// Rows of the target's pass.
    fn rows(&self) -> usize {
        // What is drafted is among the tokens once it is known.
        self.ids.len().max(1 + self.drafted)
    }
}

impl<'a> Engine<'a> {
    /// An engine of `target` with what proposes its tokens. Where their number is to be chosen, it times a
    /// few passes.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when draft and target differ in size, or the draft's vocabulary was selected from
    /// another number of tokens; a layer id or mask token that the target does not have;
    /// [`Error::LongBlock`]; [`Error::OutOfMemory`].
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

    /// Sequences that have a place.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Whether no sequence has a place.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Whether another sequence may be added.
    pub fn has_room(&self) -> bool {
        self.len() < self.options.max_sequences
    }

    /// Proposals of a block at most; 0 where nothing proposes.
    pub fn proposals(&self) -> usize {
        self.lengths.most()
    }

    /// Seconds of a step of so many sequences with no proposals each, one and so on, by the passes made so
    /// far; nothing where the number is not chosen by them.
    pub fn step_seconds(&self, sequences: usize) -> Vec<f64> {
        self.lengths.step_seconds(sequences)
    }

    /// Bytes of all keys and values: of the sequences, and of finished ones that are kept.
    pub fn cache_bytes(&self) -> (usize, usize) {
        let held = self.sequences.iter().chain(&self.resting);
        (held.map(Sequence::cache_bytes).sum(), self.prefixes.bytes())
    }

    /// Adds a sequence; [`Self::step`] tells what becomes of it.
    ///
    /// # Panics
    /// When there is no room, the prompt is empty, or prompt and answer together exceed
    /// the longest sequence: bugs of the caller.
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
        // Whether it drafts changes no text.
        let drafts = request.speculative && self.lengths.is_worth_context(self.len() + 1);
        let request = Request { speculative: drafts, ..request };
        // Where there is no memory, the pass that needs the rows says so: it can drop its sequences.
        let caches = catch_oom(|| self.new_caches(&request));
        let draft = self.proposer.draft().filter(|_| request.speculative);
        let caches = caches.unwrap_or_else(|_| empty_caches(self.target, draft, 0));
        let rule = match draft.is_some() && !self.lengths.is_auto() {
            true => AcceptanceRule::Rejection,
            // Lengths that are chosen by a clock must not change the text.
            false => AcceptanceRule::Coupled,
        };
        let (cache, context) = caches;
        let mut sequence = Sequence::new(id, request, self.target, cache, context);
        sequence.sampler = sequence.sampler.accepting_by(rule);
        self.sequences.push(sequence);
        id
    }

    /// Drops a sequence before its end. One that has ended is gone already.
    pub fn remove(&mut self, id: SequenceId) {
        if let Some(at) = self.sequences.iter().position(|sequence| sequence.id == id) {
            let sequence = self.sequences.remove(at);
            self.retire(sequence);
        } else if let Some(at) = self.resting.iter().position(|sequence| sequence.id == id) {
            let sequence = self.resting.remove(at);
            self.retire(sequence);
        }
    }

    /// Lets a sequence rest, which gives its place to another one. It keeps its caches, so that what it
    /// says does not depend on how often it rests.
    pub fn rest(&mut self, id: SequenceId) {
        if let Some(at) = self.sequences.iter().position(|sequence| sequence.id == id) {
            self.resting.push(self.sequences.remove(at));
        }
    }

    /// Gives a sequence that rests a place again.
    ///
    /// # Panics
    /// When there is no room: a bug of the caller.
    pub fn wake(&mut self, id: SequenceId) {
        assert!(self.has_room(), "{} sequences are all that fit", self.options.max_sequences);
        if let Some(at) = self.resting.iter().position(|sequence| sequence.id == id) {
            self.sequences.push(self.resting.remove(at));
        }
    }

    /// Empty caches for a sequence: those of one that has ended, where they have room.
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

    /// Keeps the caches of a sequence that has ended: for prompts that begin as it does, and emptied.
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

    /// One pass of the target, and of the draft where it proposes. Returns what came of it for every
    /// sequence that has new tokens; nothing while prompts are being read.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]: every sequence is dropped then, those that rest and the caches that were kept
    /// included.
    pub fn step(&mut self) -> Result<Vec<Output>, Error> {
        let sequences = self.len();
        catch_oom(|| self.pass()).map_err(|reason| {
            // The pass may have ended anywhere: what the caches hold is not known.
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
            // The last tokens need no more; fixed lengths stay what they are, as their figures do.
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

    /// Carries `plans` out and reads pieces of prompts.
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

    /// Keeps the caches of sequences whose prompts have come to where others part from them.
    fn keep_stopped(&mut self, reading: &[usize]) {
        for &at in reading {
            let sequence = &self.sequences[at];
            if sequence.is_at_stop() {
                keep_caches(&mut self.prefixes, sequence, self.target, self.proposer.draft());
            }
        }
    }

    /// The next pieces of prompts, as far as a step goes. Those that have least left come first and each
    /// takes an equal share at most of what is left for it and those behind it, so that a short prompt does
    /// not wait for the long ones before it.
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

    /// Before a prompt's first piece: copies what another sequence has of it already. False while an
    /// earlier one is just reading more of it than can be copied now.
    ///
    /// Where layers carry a state, caches can be copied at few lengths. Another sequence that has not
    /// come so far yet stops where the prompts part; where it has, this one stops there, and its caches
    /// are kept for the next.
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
        // At least the last token is read: its state gives the first one of the answer.
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

    /// An earlier sequence that is reading what a prompt begins with, and how many tokens they share, if
    /// these are more than can be copied now.
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
                // What it has read beyond, its caches have as far as they can be copied.
                (number, if other.cache.len() <= shared { shared } else { 0 })
            })
            .max_by_key(|(_, shared)| *shared)?;
        (shared >= live_rows.max(kept_rows) + LEAST_REUSE).then_some((other, shared))
    }
}

/// Keeps what the caches of a sequence hold for prompts that begin so.
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
    // Without memory for a copy there is none to keep the others either.
    if catch_oom(keep).is_err() {
        prefixes.clear();
    }
}
