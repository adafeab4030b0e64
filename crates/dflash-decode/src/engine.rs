//! Several sequences decoded together: one pass of the draft over all their blocks, one of the
//! target over all of them and over the prompts that are still being read.
//!
//! A [`Request`] becomes a `Sequence` with caches, a sampler and limits of its
//! own. A step drafts a block for every sequence that has its prompt behind it, takes the next piece
//! of the prompts before it, verifies each sequence by its own rows, and keeps in its caches what was
//! accepted. Attention and sampling are per sequence, so what one says does not depend on the others
//! beyond the rounding of larger products. Prompts that begin as another sequence does, one that is
//! held or one whose caches are kept (`prefixes`), start from a copy of its rows.
//!
//! Shapes: `s` sequences, `b` slots of a block, `t` tokens of a pass, `r` rows whose logits are
//! wanted, `k` captured states side by side.

mod prefixes;
mod sequence;

use dflash_model::draft::{ContextPart, Draft};
use dflash_model::objective::DraftVocabulary;
use dflash_model::ops::most_likely;
use dflash_model::target::{CachedOutput, SequencePart, Target};
use dflash_model::want_of_memory;
use tch::{Tensor, no_grad};

use self::prefixes::{Prefixes, common, usable};
use self::sequence::Sequence;
use crate::Error;
use crate::drafter::{Drafter, Proposal, Verified, to_host};
use crate::sampling::Sampling;

/// Fewer tokens than this are not worth a copy.
const LEAST_REUSE: usize = 16;

/// What an engine may use.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Sequences decoded together at most.
    pub max_sequences: usize,
    /// Tokens of a sequence at most, prompt and answer together.
    pub max_model_len: usize,
    /// Tokens of prompts that one step reads at most, so that those who decode do not wait long.
    pub prefill_tokens: usize,
    /// Bytes that the caches of finished sequences take at most.
    pub prefix_bytes: usize,
}

/// What is asked of an engine.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<i64>,
    /// Tokens of the answer at most, its end token included; at least one.
    pub max_new_tokens: usize,
    /// Tokens that end the answer.
    pub stop_ids: Vec<i64>,
    /// How its tokens are chosen.
    pub sampling: Sampling,
    /// Seed of the choice.
    pub seed: u64,
    /// Report the logarithm of each token's probability, and of so many of the most likely ones.
    pub logprobs: Option<usize>,
    /// Whether to draft, where there is a draft.
    pub speculative: bool,
}

/// A sequence of an engine, never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

/// What a step made of a sequence.
#[derive(Debug, Clone)]
pub struct Output {
    /// The sequence.
    pub id: SequenceId,
    /// New tokens, cut at the answer's end.
    pub tokens: Vec<NewToken>,
    /// The block that was verified; `None` for the token that the prompt itself gives.
    pub block: Option<Block>,
    /// Why the answer ends here. The sequence is gone then.
    pub finish: Option<Finish>,
    /// Tokens of the prompt that were not read but copied.
    pub cached_tokens: usize,
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct NewToken {
    /// The token.
    pub id: i64,
    /// Where they were asked for.
    pub logprob: Option<Logprob>,
}

/// Natural logarithms of probabilities by the target's logits, before temperature and filters.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprob {
    /// Of the token.
    pub chosen: f64,
    /// Of the most likely ones, these first.
    pub top: Vec<(i64, f64)>,
}

/// A verified block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Block {
    /// What the draft proposed.
    pub proposed: Vec<i64>,
    /// How many of these, from the first on, the target accepted.
    pub accepted: usize,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// By an end token.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

/// Decodes sequences together.
#[derive(Debug)]
pub struct Engine<'a> {
    target: &'a Target,
    drafter: Option<Drafter<'a>>,
    options: EngineOptions,
    /// In the order in which they came.
    sequences: Vec<Sequence>,
    prefixes: Prefixes,
    next_id: u64,
}

/// A sequence's part in a pass.
struct Turn {
    /// Which sequence.
    at: usize,
    /// Its tokens in the pass `[t]`.
    ids_t: Tensor,
    /// How many of the last of these have logits that are wanted.
    rows: usize,
    proposal: Proposal,
}

impl<'a> Engine<'a> {
    /// An engine of `target` alone.
    pub fn plain(target: &'a Target, options: EngineOptions) -> Self {
        let prefixes = Prefixes::new(options.prefix_bytes);
        Self { target, drafter: None, options, sequences: Vec::new(), prefixes, next_id: 0 }
    }

    /// An engine with the proposals of `draft`, only tokens of `vocabulary` where it was trained to
    /// say no others.
    ///
    /// # Errors
    /// As [`crate::Speculator::new`].
    pub fn speculative(
        target: &'a Target,
        (draft, vocabulary): (&'a Draft, Option<&DraftVocabulary>),
        options: EngineOptions,
    ) -> Result<Self, Error> {
        let drafter = Some(Drafter::new(target, draft, vocabulary)?);
        Ok(Self { drafter, ..Self::plain(target, options) })
    }

    /// Sequences held.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Whether no sequence is held.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Whether another sequence may be added.
    pub fn has_room(&self) -> bool {
        self.len() < self.options.max_sequences
    }

    /// Proposals of a block; 0 without a draft.
    pub fn proposals(&self) -> usize {
        self.drafter.as_ref().map_or(0, |drafter| drafter.block_size() - 1)
    }

    /// Bytes of all keys and values: of the sequences, and of finished ones that are kept.
    pub fn cache_bytes(&self) -> (usize, usize) {
        (self.sequences.iter().map(Sequence::cache_bytes).sum(), self.prefixes.bytes())
    }

    /// Adds a sequence; [`Self::step`] tells what becomes of it.
    ///
    /// # Panics
    /// When there is no room, the prompt is empty, no token is asked for, or both together exceed
    /// the longest sequence: bugs of the caller.
    pub fn add(&mut self, request: Request) -> SequenceId {
        let (prompt, new) = (request.prompt.len(), request.max_new_tokens);
        assert!(self.has_room(), "{} sequences are all that fit", self.options.max_sequences);
        assert!(prompt > 0 && new > 0, "a sequence has a prompt and an answer");
        let most = self.options.max_model_len;
        assert!(
            prompt + new <= most,
            "{prompt} and {new} tokens exceed the longest sequence, {most}"
        );
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let draft = self.drafter.as_ref().filter(|_| request.speculative);
        self.sequences.push(Sequence::new(id, request, self.target, draft.map(|d| d.draft)));
        id
    }

    /// Drops a sequence before its end. One that has ended is gone already.
    pub fn remove(&mut self, id: SequenceId) {
        if let Some(at) = self.sequences.iter().position(|sequence| sequence.id == id) {
            let sequence = self.sequences.remove(at);
            self.retire(sequence);
        }
    }

    /// Keeps the caches of a sequence that has ended for prompts that begin as it does.
    fn retire(&mut self, sequence: Sequence) {
        let draft = self.drafter.as_ref().map(|drafter| drafter.draft);
        keep_caches(&mut self.prefixes, &sequence, (self.target, draft));
    }

    /// One pass of the draft and one of the target. Returns what came of it for every sequence that
    /// has new tokens; nothing while prompts are being read.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]: every sequence is dropped then, and so are the caches that were kept.
    pub fn step(&mut self) -> Result<Vec<Output>, Error> {
        let sequences = self.len();
        want_of_memory(|| self.pass()).map_err(|reason| {
            // The pass may have ended anywhere: what the caches hold is not known.
            self.sequences.clear();
            self.prefixes.clear();
            Error::OutOfMemory { sequences, reason }
        })
    }

    fn pass(&mut self) -> Vec<Output> {
        no_grad(|| {
            let mut turns = self.drafted_turns();
            turns.extend(self.prefill_turns());
            if turns.is_empty() {
                return Vec::new();
            }
            // In the order of the sequences, as the caches are borrowed.
            turns.sort_by_key(|turn| turn.at);
            let before: Vec<usize> =
                turns.iter().map(|turn| self.sequences[turn.at].cache.len()).collect();
            let output = self.run(&turns);
            let (outputs, kept) = self.verify(&turns, &output);
            self.keep(&turns, &before, (&output, &kept));
            let stopped = |turn: &&Turn| self.sequences[turn.at].is_at_stop();
            let stopped: Vec<usize> = turns.iter().filter(stopped).map(|turn| turn.at).collect();
            let draft = self.drafter.as_ref().map(|drafter| drafter.draft);
            for at in stopped {
                keep_caches(&mut self.prefixes, &self.sequences[at], (self.target, draft));
            }
            let ended: Vec<SequenceId> =
                outputs.iter().filter(|out| out.finish.is_some()).map(|out| out.id).collect();
            ended.into_iter().for_each(|id| self.remove(id));
            outputs
        })
    }

    /// The blocks of all sequences that are past their prompts.
    fn drafted_turns(&mut self) -> Vec<Turn> {
        let ready: Vec<(usize, i64)> =
            (0..self.len()).filter_map(|at| Some((at, self.sequences[at].bonus()?))).collect();
        let drafting: Vec<(usize, i64)> =
            ready.iter().copied().filter(|&(at, _)| self.sequences[at].context.is_some()).collect();
        let mut proposals = self.propose(&drafting).into_iter();
        let turn = |(at, bonus): (usize, i64)| {
            let bonus_1 = to_device(&[bonus], self.target);
            let proposal = match self.sequences[at].context {
                Some(_) => proposals.next().expect("one for each that drafts"),
                None => Proposal::none(self.target),
            };
            let ids_t = Tensor::cat(&[&bonus_1, &proposal.ids_b], 0);
            Turn { at, ids_t, rows: proposal.len() + 1, proposal }
        };
        ready.into_iter().map(turn).collect()
    }

    /// The draft's proposals behind the bonus tokens of sequences.
    fn propose(&mut self, drafting: &[(usize, i64)]) -> Vec<Proposal> {
        let Some(drafter) = self.drafter.as_ref().filter(|_| !drafting.is_empty()) else {
            return Vec::new();
        };
        let bonus: Vec<i64> = drafting.iter().map(|&(_, bonus)| bonus).collect();
        let caches: Vec<_> = drafting
            .iter()
            .map(|&(at, _)| self.sequences[at].context.as_ref().expect("it drafts"))
            .collect();
        let blocks_nh = drafter.blocks(&to_device(&bonus, self.target));
        let logits_nv = drafter.logits(&drafter.draft.forward_blocks(&caches, &blocks_nh));
        let each = drafter.block_size() as i64 - 1;
        let propose = |(number, &(at, _)): (usize, &(usize, i64))| {
            let logits_bv = logits_nv.narrow(0, number as i64 * each, each);
            drafter.propose(&logits_bv, &mut self.sequences[at].sampler)
        };
        drafting.iter().enumerate().map(propose).collect()
    }

    /// The next pieces of prompts, in order, as far as a step goes.
    fn prefill_turns(&mut self) -> Vec<Turn> {
        let mut budget = self.options.prefill_tokens;
        let mut turns = Vec::new();
        for at in 0..self.len() {
            if budget == 0 {
                break;
            }
            if self.sequences[at].bonus().is_some() || !self.begin(at) {
                continue;
            }
            let sequence = &self.sequences[at];
            let piece = sequence.next_piece(budget);
            budget = budget.saturating_sub(piece.len());
            let end = sequence.cache.len() + piece.len();
            let ids_t = to_device(piece, self.target);
            let rows = usize::from(end == sequence.prompt_tokens());
            turns.push(Turn { at, ids_t, rows, proposal: Proposal::none(self.target) });
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
            let draft = self.drafter.as_ref().map(|drafter| drafter.draft);
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

    /// Runs the target over all turns, which appends them to the caches.
    fn run(&mut self, turns: &[Turn]) -> CachedOutput {
        let (target, draft) = (self.target, self.drafter.as_ref().map(|drafter| drafter.draft));
        let ids_t: Vec<&Tensor> = turns.iter().map(|turn| &turn.ids_t).collect();
        let mut parts = Vec::with_capacity(turns.len());
        let mut turns = turns.iter().peekable();
        for (at, sequence) in self.sequences.iter_mut().enumerate() {
            let Some(turn) = turns.next_if(|turn| turn.at == at) else { continue };
            let tokens = turn.ids_t.size()[0] as usize;
            sequence.make_room(tokens, (target, draft));
            parts.push(SequencePart { cache: &mut sequence.cache, tokens });
        }
        let captures = draft.map_or(&[][..], |draft| &draft.config().target_layer_ids);
        target.forward_sequences(&Tensor::cat(&ids_t, 0), &mut parts, captures)
    }

    /// What each sequence says now, and how many of its tokens in the pass stay.
    fn verify(&mut self, turns: &[Turn], output: &CachedOutput) -> (Vec<Output>, Vec<usize>) {
        let wanted: Vec<i64> =
            ends(turns).zip(turns).flat_map(|(end, turn)| end - turn.rows as i64..end).collect();
        let tokens = |turn: &Turn| turn.ids_t.size()[0] as usize;
        if wanted.is_empty() {
            return (Vec::new(), turns.iter().map(tokens).collect());
        }
        let rows_rh = output.hidden_td.index_select(0, &to_device(&wanted, self.target));
        let logits_rv = self.target.logits(&rows_rh);
        let mut greedy = self.greedy_choices(turns, &logits_rv);
        let (mut outputs, mut kept, mut first) = (Vec::new(), Vec::new(), 0);
        for (number, turn) in turns.iter().enumerate() {
            if turn.rows == 0 {
                kept.push(tokens(turn));
                continue;
            }
            let logits_bv = logits_rv.narrow(0, first, turn.rows as i64);
            first += turn.rows as i64;
            let sequence = &mut self.sequences[turn.at];
            let block = sequence.bonus().map(|_| turn.proposal.len());
            let (verified, proposed) = match greedy[number].take() {
                Some((proposed, own)) => (Verified::greedy(&proposed, &own), proposed),
                None => {
                    let verified = turn.proposal.verify(&logits_bv, &mut sequence.sampler);
                    (verified, to_host(&turn.proposal.ids_b))
                }
            };
            kept.push(tokens(turn) - turn.proposal.len() + verified.accepted.len());
            let accepted = verified.accepted.len();
            let block = block.filter(|&len| len > 0).map(|_| Block { proposed, accepted });
            outputs.push(sequence.take(verified.into_tokens(), block, &logits_bv));
        }
        (outputs, kept)
    }

    /// Of each greedy turn the proposals and the target's own choices, in one transfer: on a GPU
    /// every read waits for the whole step.
    fn greedy_choices(
        &self,
        turns: &[Turn],
        logits_rv: &Tensor,
    ) -> Vec<Option<(Vec<i64>, Vec<i64>)>> {
        let is_greedy = |turn: &Turn| turn.rows > 0 && self.sequences[turn.at].sampler.is_greedy();
        if !turns.iter().any(is_greedy) {
            return turns.iter().map(|_| None).collect();
        }
        let own_r = most_likely(logits_rv);
        let mut all: Vec<&Tensor> = vec![&own_r];
        all.extend(turns.iter().map(|turn| &turn.proposal.ids_b));
        let all = to_host(&Tensor::cat(&all, 0));
        let (mut own, mut proposed) = all.split_at(own_r.size()[0] as usize);
        let mut next = |turn: &Turn| {
            let (mine, rest) = own.split_at(turn.rows);
            let (proposals, others) = proposed.split_at(turn.proposal.len());
            (own, proposed) = (rest, others);
            is_greedy(turn).then(|| (proposals.to_vec(), mine.to_vec()))
        };
        turns.iter().map(&mut next).collect()
    }

    /// Cuts the target's caches back to what stays and gives its captured states to the draft's.
    fn keep(
        &mut self,
        turns: &[Turn],
        before: &[usize],
        (output, kept): (&CachedOutput, &[usize]),
    ) {
        let mut rows: Vec<i64> = Vec::new();
        let mut parts: Vec<ContextPart<'_>> = Vec::new();
        let starts = ends(turns).zip(turns).map(|(end, turn)| end - turn.ids_t.size()[0]);
        let mut each = turns.iter().zip(starts).zip(before.iter().zip(kept)).peekable();
        for (at, sequence) in self.sequences.iter_mut().enumerate() {
            let Some(((_, start), (&before, &kept))) = each.next_if(|((turn, _), _)| turn.at == at)
            else {
                continue;
            };
            sequence.cache.truncate(before + kept);
            if let Some(cache) = &mut sequence.context {
                rows.extend(start..start + kept as i64);
                parts.push(ContextPart { cache, rows: kept });
            }
        }
        if let Some(drafter) = self.drafter.as_ref().filter(|_| !parts.is_empty()) {
            let rows_t = Tensor::from_slice(&rows).to_device(self.target.device());
            let features_tk = Tensor::cat(&output.captures, 1).index_select(0, &rows_t);
            drafter.draft.extend_contexts(&features_tk, &mut parts);
        }
    }
}

/// Keeps what the caches of a sequence hold for prompts that begin so.
fn keep_caches(prefixes: &mut Prefixes, sequence: &Sequence, models: (&Target, Option<&Draft>)) {
    if sequence.is_whole {
        return;
    }
    let keep = || no_grad(|| prefixes.insert(sequence.held(), sequence.caches(), models));
    // Without memory for a copy there is none to keep the others either.
    if want_of_memory(keep).is_err() {
        prefixes.clear();
    }
}

/// Behind the last token of each turn, counted over all of them.
fn ends(turns: &[Turn]) -> impl Iterator<Item = i64> {
    turns.iter().scan(0, |end, turn| {
        *end += turn.ids_t.size()[0];
        Some(*end)
    })
}

fn to_device(ids: &[i64], target: &Target) -> Tensor {
    Tensor::from_slice(ids).to_device(target.device())
}
