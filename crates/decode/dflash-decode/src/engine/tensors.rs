//! A step with libtorch operations: prompts, GPUs, and models without packed few-row passes.
//!
//! Shapes: `s` sequences, `b` slots of a block, `t` tokens of a pass, `r` rows whose logits are
//! needed, `k` auxiliary hidden states, concatenated.

use std::time::Instant;

use dflash_draft::ContextPart;
use dflash_target::{CachedOutput, SequencePart, Target};
use dflash_tensor::ops::most_likely;
use tch::Tensor;

use super::lengths::Cost;
use super::proposer::Proposer;
use super::sequence::Sequence;
use super::{Output, Plan};
use crate::drafter::{Drafter, to_host};

/// One sequence's part of a pass.
pub(super) struct Turn {
    /// Index of the sequence.
    pub(super) at: usize,
    /// Its tokens in the pass `[t]`.
    ids_t: Tensor,
    /// Number of its last tokens whose logits are needed: one more than were proposed, or none.
    rows: usize,
    /// The distributions of the proposals, if verification needs them.
    shares: Option<Tensor>,
}

impl Turn {
    /// The next piece of a prompt; the last piece gives a token.
    pub(super) fn of_prompt(at: usize, piece: &[i64], is_last: bool, target: &Target) -> Self {
        Self { at, ids_t: to_device(piece, target), rows: usize::from(is_last), shares: None }
    }

    fn tokens(&self) -> usize {
        self.ids_t.size()[0] as usize
    }

    fn proposed(&self) -> Tensor {
        let proposed = self.rows.saturating_sub(1);
        self.ids_t.narrow(0, (self.tokens() - proposed) as i64, proposed as i64)
    }
}

/// Drafts for `plans`, runs the target over them and over pieces of prompts, processes the output,
/// and keeps accepted tokens in the caches.
///
/// On a GPU the draft's time is included in the verification's, which waits for it.
pub(super) fn step(
    sequences: &mut [Sequence],
    plans: &[Plan],
    prompts: Vec<Turn>,
    target: &Target,
    proposer: &Proposer<'_>,
) -> (Vec<Output>, Cost) {
    let began = Instant::now();
    let mut turns = drafted(sequences, plans, target, proposer);
    let draft = began.elapsed().as_secs_f64();
    turns.extend(prompts);
    // In sequence order, in which the caches are borrowed.
    turns.sort_by_key(|turn| turn.at);
    let before: Vec<usize> = turns.iter().map(|turn| sequences[turn.at].cache.len()).collect();
    let output = run(sequences, &turns, target, proposer);
    for ((turn, end), &before) in turns.iter().zip(ends(&turns)).zip(&before) {
        let tokens = turn.tokens() as i64;
        let states_th = output.hidden_td.narrow(0, end - tokens, tokens);
        sequences[turn.at].read_prompt(&states_th, before, target);
    }
    let (outputs, kept) = verify(sequences, &turns, &output, target);
    keep(sequences, &turns, &before, &output, &kept, proposer);
    let cost = Cost {
        rows: plans.iter().map(Plan::rows).sum(),
        drafting: plans.iter().filter(|plan| plan.drafted > 0).count(),
        verify: began.elapsed().as_secs_f64() - draft,
        draft,
    };
    (outputs, cost)
}

/// Turns of the sequences that are past their prompts, with looked-up and newly drafted proposals.
fn drafted(
    sequences: &[Sequence],
    plans: &[Plan],
    target: &Target,
    proposer: &Proposer<'_>,
) -> Vec<Turn> {
    let drafting: Vec<&Plan> = plans.iter().filter(|plan| plan.drafted > 0).collect();
    let mut proposals = match proposer.drafter().filter(|_| !drafting.is_empty()) {
        Some(drafter) => propose(sequences, &drafting, drafter),
        None => Vec::new(),
    }
    .into_iter();
    let turn = |plan: &Plan| {
        let (mut ids_t, mut shares) = (to_device(&plan.ids, target), None);
        if plan.drafted > 0 {
            let proposed;
            (proposed, shares) = proposals.next().expect("one for each that drafts");
            ids_t = Tensor::cat(&[ids_t, proposed], 0);
        }
        // A head may propose fewer tokens than planned.
        let rows = ids_t.size()[0] as usize;
        Turn { at: plan.at, ids_t, rows, shares }
    };
    plans.iter().map(turn).collect()
}

/// The draft's proposals after the sequences' bonus tokens, with the distributions for
/// [`Turn::shares`].
fn propose(
    sequences: &[Sequence],
    plans: &[&Plan],
    drafter: &Drafter<'_>,
) -> Vec<(Tensor, Option<Tensor>)> {
    let bonus: Vec<i64> = plans.iter().map(|plan| plan.ids[0]).collect();
    let caches: Vec<_> =
        plans.iter().map(|plan| sequences[plan.at].context.as_ref().expect("it drafts")).collect();
    let blocks_nh = drafter.blocks(&to_device(&bonus, drafter.target));
    let normed_nh = drafter.draft.forward_blocks(&caches, &blocks_nh);
    let each = plans.iter().map(|plan| plan.drafted).max().unwrap_or(0);
    let normed_nh = drafter.predicting(&normed_nh, each);
    let is_plain = drafter.draft.head().is_plain();
    let is_greedy = |plan: &&Plan| is_plain && sequences[plan.at].sampler.is_greedy();
    let greedy_n = plans.iter().any(is_greedy).then(|| drafter.most_likely(&normed_nh));
    let choose = |(number, plan): (usize, &&Plan)| {
        let rows = |x: &Tensor| x.narrow(0, (number * each) as i64, plan.drafted as i64);
        let sequence = &sequences[plan.at];
        match greedy_n.as_ref().filter(|_| is_greedy(plan)) {
            Some(greedy_n) => (rows(greedy_n), None),
            None => {
                let first = sequence.tokens().len();
                let proposed =
                    drafter.choose(&rows(&normed_nh), plan.ids[0], &sequence.sampler, first);
                (to_device(&proposed.ids, drafter.target), proposed.shares)
            }
        }
    };
    plans.iter().enumerate().map(choose).collect()
}

/// Runs the target over all turns, appending to the caches.
fn run(
    sequences: &mut [Sequence],
    turns: &[Turn],
    target: &Target,
    proposer: &Proposer<'_>,
) -> CachedOutput {
    let draft = proposer.draft();
    let ids_t: Vec<&Tensor> = turns.iter().map(|turn| &turn.ids_t).collect();
    let mut parts = Vec::with_capacity(turns.len());
    let mut turns = turns.iter().peekable();
    for (at, sequence) in sequences.iter_mut().enumerate() {
        let Some(turn) = turns.next_if(|turn| turn.at == at) else { continue };
        sequence.make_room(turn.tokens(), target, draft);
        parts.push(SequencePart { cache: &mut sequence.cache, tokens: turn.tokens() });
    }
    let aux_layers = draft.map_or(&[][..], |draft| &draft.config().target_layer_ids);
    target.forward_sequences(&Tensor::cat(&ids_t, 0), &mut parts, aux_layers)
}

/// Each sequence's output, and how many of its tokens in the pass are kept.
fn verify(
    sequences: &mut [Sequence],
    turns: &[Turn],
    output: &CachedOutput,
    target: &Target,
) -> (Vec<Output>, Vec<usize>) {
    let wanted: Vec<i64> =
        ends(turns).zip(turns).flat_map(|(end, turn)| end - turn.rows as i64..end).collect();
    if wanted.is_empty() {
        return (Vec::new(), turns.iter().map(Turn::tokens).collect());
    }
    let rows_rh = output.hidden_td.index_select(0, &to_device(&wanted, target));
    let logits_rv = target.logits(&rows_rh);
    // One transfer for everything: on a GPU each read waits for the whole step.
    let mut all = vec![most_likely(&logits_rv)];
    all.extend(turns.iter().map(Turn::proposed));
    let all = to_host(&Tensor::cat(&all, 0));
    let (mut most_likely, mut proposed) = all.split_at(wanted.len());
    let (mut outputs, mut kept, mut first) = (Vec::new(), Vec::new(), 0);
    for turn in turns {
        if turn.rows == 0 {
            kept.push(turn.tokens());
            continue;
        }
        let sequence = &mut sequences[turn.at];
        let logits_bv = logits_rv.narrow(0, first, turn.rows as i64);
        first += turn.rows as i64;
        let (greedy, proposals);
        (greedy, most_likely) = most_likely.split_at(turn.rows);
        (proposals, proposed) = proposed.split_at(turn.rows - 1);
        let is_chosen = !sequence.is_plainly_greedy();
        let chosen =
            is_chosen.then(|| sequence.verify(proposals, turn.shares.as_ref(), &logits_bv));
        let own = chosen.as_deref().unwrap_or(greedy);
        let (output, rows) = sequence.take(proposals, own, Some(&logits_bv));
        kept.push(turn.tokens() - turn.rows + rows);
        outputs.push(output);
    }
    (outputs, kept)
}

/// Truncates the target's caches to the kept tokens; queues their features for the draft.
fn keep(
    sequences: &mut [Sequence],
    turns: &[Turn],
    before: &[usize],
    output: &CachedOutput,
    kept: &[usize],
    proposer: &Proposer<'_>,
) {
    let mut rows: Vec<i64> = Vec::new();
    let mut parts: Vec<ContextPart<'_>> = Vec::new();
    let starts = ends(turns).zip(turns).map(|(end, turn)| end - turn.tokens() as i64);
    let mut each = turns.iter().zip(starts).zip(before.iter().zip(kept)).peekable();
    for (at, sequence) in sequences.iter_mut().enumerate() {
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
    if let Some(drafter) = proposer.drafter().filter(|_| !parts.is_empty()) {
        let rows_t = Tensor::from_slice(&rows).to_device(drafter.target.device());
        let features_tk = Tensor::cat(&output.aux_states, 1).index_select(0, &rows_t);
        drafter.draft.extend_contexts(&features_tk, &mut parts);
    }
}

/// End of each turn's tokens, cumulative.
fn ends(turns: &[Turn]) -> impl Iterator<Item = i64> {
    turns.iter().scan(0, |end, turn| {
        *end += turn.ids_t.size()[0];
        Some(*end)
    })
}

fn to_device(ids: &[i64], target: &Target) -> Tensor {
    Tensor::from_slice(ids).to_device(target.device())
}
