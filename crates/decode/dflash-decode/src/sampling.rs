//! Greedy and random sampling that preserves the target's distribution.
//!
//! Random numbers come from a seeded generator on the host and are turned into tokens on the
//! device: the same seed gives the same text, and only chosen tokens are transferred. Shapes: `r`
//! rows (positions), `v` vocabulary.

use dflash_tensor::ops::most_likely;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Device, Kind, Tensor};

use crate::drafter::to_host;

/// How tokens are chosen from logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 for greedy.
    pub temperature: f64,
    /// Keep only the most likely tokens with at least this total probability; 1 for all.
    pub top_p: f64,
    /// Keep only this many most likely tokens; `None` for all.
    pub top_k: Option<usize>,
    /// Keep only tokens with at least this fraction of the highest probability; 0 for all.
    pub min_p: f64,
}

impl Sampling {
    /// Greedy.
    pub const GREEDY: Self = Self::at(0.0);

    /// All tokens, at a temperature.
    pub const fn at(temperature: f64) -> Self {
        Self { temperature, top_p: 1.0, top_k: None, min_p: 0.0 }
    }

    /// Whether sampling is greedy.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Distributions [R, V] of logits [R, V], float64. Not defined for greedy sampling.
    pub(crate) fn distributions(&self, logits_rv: &Tensor) -> Tensor {
        debug_assert!(!self.is_greedy(), "greedy decoding compares tokens, not distributions");
        let mut scaled_rv = logits_rv.to_kind(Kind::Double) / self.temperature;
        if self.min_p > 0.0 {
            let least_r1 = scaled_rv.amax([-1i64].as_slice(), true) + self.min_p.ln();
            scaled_rv = scaled_rv.masked_fill(&scaled_rv.lt_tensor(&least_r1), f64::NEG_INFINITY);
        }
        let tokens = logits_rv.size()[1];
        let top_k = self.top_k.map_or(tokens, |count| tokens.min(count as i64));
        if top_k == tokens && self.top_p >= 1.0 {
            return scaled_rv.softmax(-1, Kind::Double);
        }
        match logits_rv.device() {
            Device::Cpu => self.filtered_on_host(&scaled_rv, top_k as usize),
            _ => self.filtered(&scaled_rv, top_k),
        }
    }

    /// Distributions of scaled logits [R, V], filtered by `top_k` and then top_p.
    fn filtered(&self, scaled_rv: &Tensor, top_k: i64) -> Tensor {
        // Most likely first, stable, so that the cut among equal tokens is deterministic.
        let (sorted_rk, ids_rk) = scaled_rv.sort_stable(true, -1, true);
        let shares_rk = sorted_rk.narrow(1, 0, top_k).softmax(-1, Kind::Double);
        // A token is kept while those before it do not reach the share, so at least one is.
        let before_rk = shares_rk.cumsum(-1, Kind::Double) - &shares_rk;
        let kept_rk = shares_rk.masked_fill(&before_rk.ge(self.top_p), 0.0);
        let total_r1 = kept_rk.sum_dim_intlist([-1i64].as_slice(), true, Kind::Double);
        let none_rv = Tensor::zeros_like(scaled_rv);
        none_rv.scatter(1, &ids_rk.narrow(1, 0, top_k), &(kept_rk / total_r1))
    }

    /// [`Self::filtered`] without sorting whole vocabularies, which would dominate a small target's
    /// pass.
    fn filtered_on_host(&self, scaled_rv: &Tensor, top_k: usize) -> Tensor {
        let shares_rv = scaled_rv.softmax(-1, Kind::Double);
        let mut shares: Vec<f64> =
            Vec::try_from(shares_rv.flatten(0, -1)).expect("shares are float64");
        let mut likely: Vec<(f64, usize)> = Vec::new();
        for row in shares.chunks_mut(scaled_rv.size()[1] as usize) {
            likely.clear();
            likely.extend(row.iter().enumerate().map(|(id, &share)| (share, id)));
            self.keep_likely(&mut likely, top_k);
            let total: f64 = likely.iter().map(|(share, _)| share).sum();
            row.fill(0.0);
            likely.iter().for_each(|&(share, id)| row[id] = share / total);
        }
        Tensor::from_slice(&shares).view_as(scaled_rv)
    }

    /// Filters a row's (share, id) pairs by `top_k` and then top_p, most likely first; the first of
    /// equal ones wins.
    fn keep_likely(&self, likely: &mut Vec<(f64, usize)>, top_k: usize) {
        let order = |a: &(f64, usize), b: &(f64, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if top_k < likely.len() {
            likely.select_nth_unstable_by(top_k, order);
            likely.truncate(top_k);
        }
        if self.top_p >= 1.0 {
            return;
        }
        let total: f64 = likely.iter().map(|(share, _)| share).sum();
        // Tokens below this together have less than the share to cut, so none of them is kept.
        let least = total * (1.0 - self.top_p) / likely.len() as f64;
        likely.retain(|&(share, _)| share >= least);
        likely.sort_unstable_by(order);
        let mut before = 0.0;
        let reached = likely.iter().position(|(share, _)| {
            let reached = before >= self.top_p * total;
            before += share;
            reached
        });
        likely.truncate(reached.unwrap_or(likely.len()));
    }
}

/// Number of token groups in the first stage of a draw.
const GROUPS: i64 = 256;
/// Random words reserved per position: two per group and for the draw within it, rounded up to
/// whole generator blocks.
const WORDS: u128 = 528;

/// How a sampled proposal is verified. Both rules preserve the target's distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcceptanceRule {
    /// Proposal and target token of a position use the same random numbers, so that similar
    /// distributions mostly give the same token: groups of tokens race with exponential waiting
    /// times divided by their shares, and the cumulative share decides within the winner. The text
    /// equals that without a draft, whatever is proposed.
    Coupled,
    /// Rejection sampling: a proposal is kept with the ratio of the two shares, otherwise a token
    /// is drawn from the target's excess over the draft. This accepts the most, 1 - d for
    /// distributions at distance d, where [`Self::Coupled`] may accept as few as (1 - d) / (1 + d);
    /// but the text depends on the draft and the number of proposals.
    Rejection,
}

/// Random streams: the target's own tokens, proposals, and acceptance.
const OWN: u64 = 0;
const PROPOSED: u64 = 1;
const KEPT: u64 = 2;

/// Chooses tokens of a text; a token's random numbers depend only on the seed and its position.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    rule: AcceptanceRule,
}

/// Sampled proposals: tokens `[n]`, and their distributions [n, V] if verification needs them.
#[derive(Debug)]
pub(crate) struct Proposed {
    pub(crate) ids: Vec<i64>,
    pub(crate) shares: Option<Tensor>,
}

impl Sampler {
    /// A sampler with `seed`, which is unused if `sampling` is greedy.
    pub fn new(sampling: Sampling, seed: u64) -> Self {
        Self { sampling, seed, rule: AcceptanceRule::Coupled }
    }

    /// Sets the verification rule.
    pub(crate) fn accepting_by(self, rule: AcceptanceRule) -> Self {
        Self { rule, ..self }
    }

    /// Whether sampling is greedy.
    pub fn is_greedy(&self) -> bool {
        self.sampling.is_greedy()
    }

    /// Tokens for rows of logits [R, V], at the positions from `first` on.
    pub fn choose(&self, logits_rv: &Tensor, first: usize) -> Vec<i64> {
        match self.is_greedy() {
            true => to_host(&most_likely(logits_rv)),
            false => self.draw(&self.distributions(logits_rv), first, OWN),
        }
    }

    /// Draws proposals from weights [n, V], for the positions from `first` on.
    pub(crate) fn propose(&self, weights_nv: Tensor, first: usize) -> Proposed {
        match self.rule {
            AcceptanceRule::Coupled => {
                Proposed { ids: self.draw(&weights_nv, first, OWN), shares: None }
            }
            AcceptanceRule::Rejection => {
                Proposed { ids: self.draw(&weights_nv, first, PROPOSED), shares: Some(weights_nv) }
            }
        }
    }

    /// The target's tokens given its logits [n + 1, V] at the positions from `first` on: the
    /// accepted proposals and one more.
    pub(crate) fn verify(
        &self,
        proposed: &[i64],
        draft_nv: Option<&Tensor>,
        logits_bv: &Tensor,
        first: usize,
    ) -> Vec<i64> {
        let Some(draft_nv) = draft_nv.filter(|_| !self.is_greedy()) else {
            return self.choose(logits_bv, first);
        };
        let target_bv = self.distributions(logits_bv);
        let rows = proposed.len() as i64;
        let ids_n1 = Tensor::from_slice(proposed).to_device(logits_bv.device()).unsqueeze(1);
        let of_proposed = |distributions: &Tensor| -> Vec<f64> {
            let chosen = distributions.narrow(0, 0, rows).gather(1, &ids_n1, false);
            Vec::try_from(chosen.flatten(0, -1)).expect("shares are float64")
        };
        let (p, q) = (of_proposed(&target_bv), of_proposed(draft_nv));
        let RandomNumbers { uniform, .. } = self.random(first, rows, 0, KEPT);
        let kept = (0..proposed.len()).take_while(|&slot| uniform[slot] * q[slot] < p[slot]);
        let kept = kept.count();
        let row = |distributions: &Tensor| distributions.narrow(0, kept as i64, 1);
        let weights_1v = match kept < proposed.len() {
            true => (row(&target_bv) - row(draft_nv)).clamp_min(0.0),
            false => row(&target_bv),
        };
        let mut own = proposed[..kept].to_vec();
        own.extend(self.draw(&weights_1v, first + kept, OWN));
        own
    }

    /// As [`Sampling::distributions`].
    pub(crate) fn distributions(&self, logits_rv: &Tensor) -> Tensor {
        self.sampling.distributions(logits_rv)
    }

    /// Draws one token per row of non-negative weights [R, V], in proportion to them, at the
    /// positions from `first` on with the random stream `stream`. Shapes: `m` tokens of a group,
    /// `g` groups.
    fn draw(&self, weights_rv: &Tensor, first: usize, stream: u64) -> Vec<i64> {
        let size = weights_rv.size();
        let (rows, tokens) = (size[0], size[1]);
        let groups = match self.rule {
            AcceptanceRule::Coupled => GROUPS,
            // Random numbers that are not shared need no race.
            AcceptanceRule::Rejection => 1,
        };
        let members = (tokens + groups - 1) / groups;
        let groups = (tokens + members - 1) / members;
        let random = self.random(first, rows, groups, stream);
        match weights_rv.device() {
            Device::Cpu => draw_on_host(weights_rv, groups as usize, random),
            _ => draw_by_tensors(weights_rv, members, groups, random),
        }
    }

    /// The random numbers of the groups at the `rows` positions from `first` on.
    fn random(&self, first: usize, rows: i64, groups: i64, stream: u64) -> RandomNumbers {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(stream);
        let (mut waits, mut uniform) = (Vec::new(), Vec::new());
        for position in first..first + rows as usize {
            random.set_word_pos(position as u128 * WORDS);
            // 53 random bits, and never 0: a group of weight 0 would win.
            let mut next = || ((random.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            uniform.push(next());
            waits.extend((0..groups).map(|_| -next().ln()));
        }
        RandomNumbers { waits, uniform }
    }
}

/// What chance decides of a draw.
struct RandomNumbers {
    /// Waiting times [R, G] of the groups.
    waits: Vec<f64>,
    /// A number in (0, 1) `[R]` for the draw in the first group.
    uniform: Vec<f64>,
}

/// [`Sampler::draw`] without tensor operations, which take longer than a small target's pass.
fn draw_on_host(
    weights_rv: &Tensor,
    groups: usize,
    RandomNumbers { waits, uniform }: RandomNumbers,
) -> Vec<i64> {
    let weights = Vec::<f64>::try_from(weights_rv.to_kind(Kind::Double).flatten(0, -1));
    let weights = weights.expect("weights are float64");
    let rows = weights.chunks(weights_rv.size()[1] as usize);
    let mut shares = vec![0.0; groups];
    let draw = |(row, (waits, uniform)): (&[f64], (&[f64], f64))| {
        shares.fill(0.0);
        for each in row.chunks(groups) {
            shares.iter_mut().zip(each).for_each(|(share, weight)| *share += weight);
        }
        let wait = |group: &usize| waits[*group] / shares[*group];
        let first = (0..groups).min_by(|a, b| wait(a).total_cmp(&wait(b))).unwrap_or(0);
        let drawn = uniform * shares[first];
        let mut cumulative = 0.0;
        let of_group = (first..row.len()).step_by(groups);
        let chosen = of_group.clone().find(|&id| {
            cumulative += row[id];
            cumulative > drawn
        });
        // If rounding leaves the sum below the draw, use the last token with positive weight.
        let last = || of_group.rev().find(|&id| row[id] > 0.0).unwrap_or(first);
        chosen.unwrap_or_else(last) as i64
    };
    rows.zip(waits.chunks(groups).zip(uniform)).map(draw).collect()
}

/// [`draw_on_host`] for weights on a GPU: only the drawn tokens are transferred.
fn draw_by_tensors(
    weights_rv: &Tensor,
    members: i64,
    groups: i64,
    RandomNumbers { waits, uniform }: RandomNumbers,
) -> Vec<i64> {
    let (rows, device) = (weights_rv.size()[0], weights_rv.device());
    let of_group_rmg = weights_rv
        .constant_pad_nd([0, members * groups - weights_rv.size()[1]])
        .view([rows, members, groups]);
    let shares_rg = of_group_rmg.sum_dim_intlist([1i64].as_slice(), false, Kind::Double);
    let waits_rg = Tensor::from_slice(&waits).view([rows, groups]).to_device(device);
    let first_r = (waits_rg / shares_rg).argmin(-1, false);
    let at_r11 = first_r.view([rows, 1, 1]).expand([-1, members, 1], false);
    let cumulative_rm =
        of_group_rmg.gather(2, &at_r11, false).squeeze_dim(2).cumsum(-1, Kind::Double);
    let total_r1 = cumulative_rm.narrow(1, members - 1, 1);
    let drawn_r1 = Tensor::from_slice(&uniform).to_device(device).unsqueeze(1) * total_r1;
    // The first whose cumulative weight exceeds the draw; never one with weight 0.
    let member = drawn_r1.searchsorted(&cumulative_rm, false, true, "right", None::<&Tensor>);
    let member_r = member.flatten(0, -1).clamp_max(members - 1);
    to_host(&(member_r * groups + first_r))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_on_the_host_are_those_of_sorted_vocabularies() {
        let _alone = dflash_test_support::alone();
        tch::manual_seed(11);
        // Rounded, so that some logits are equal.
        let logits_rv = (Tensor::randn([40, 300], (Kind::Float, Device::Cpu)) * 6.0).round();
        for (temperature, top_k, top_p) in [
            (1.0, None, 0.9),
            (0.3, None, 0.5),
            (2.0, Some(1), 1.0),
            (1.0, Some(7), 1.0),
            (1.0, Some(40), 0.8),
            (1.0, Some(900), 0.999),
            (5.0, None, 1e-9),
        ] {
            let sampling = Sampling { temperature, top_p, top_k, min_p: 0.0 };
            let scaled_rv = logits_rv.to_kind(Kind::Double) / temperature;
            let most = top_k.map_or(300, |count| count.min(300));
            let host_rv = sampling.filtered_on_host(&scaled_rv, most);
            let sorted_rv = sampling.filtered(&scaled_rv, most as i64);
            let apart = (&host_rv - &sorted_rv).abs().max().double_value(&[]);
            assert!(apart < 1e-12, "{sampling:?}: {apart}");
            assert_eq!(host_rv.ne(0.0), sorted_rv.ne(0.0), "{sampling:?}");
        }
    }

    #[test]
    fn draws_follow_the_weights_and_never_pick_a_zero() {
        let sampler = Sampler::new(Sampling::at(1.0), 7);
        // With few tokens each is its own group; with many, several share one.
        for (tokens, one, other) in [(5, 1, 3), (1000, 1, 251), (1000, 90, 601), (1000, 998, 999)] {
            let weights = Tensor::zeros([1, tokens], (Kind::Double, Device::Cpu));
            let _ = weights.narrow(1, one, 1).fill_(0.2);
            let _ = weights.narrow(1, other, 1).fill_(0.6);
            let draws = sampler.draw(&weights.expand([20_000, tokens], false), 3, OWN);
            let share = |id| draws.iter().filter(|&&draw| draw == id).count() as f64 / 20_000.0;
            // Three standard deviations of 20,000 draws are below 0.01.
            assert!((share(one) - 0.25).abs() < 0.01, "{tokens} {one}: {}", share(one));
            assert_eq!(share(one) + share(other), 1.0);
        }
    }

    #[test]
    fn draws_on_the_host_are_those_by_tensors() {
        let _alone = dflash_test_support::alone();
        tch::manual_seed(6);
        let sampler = Sampler::new(Sampling::at(1.0), 9);
        for tokens in [3, 255, 256, 257, 1000, 5000] {
            let logits = Tensor::randn([30, tokens], (Kind::Double, Device::Cpu)) * 3.0;
            let weights = logits.softmax(-1, Kind::Double);
            let members = (tokens + GROUPS - 1) / GROUPS;
            let groups = (tokens + members - 1) / members;
            let random = || sampler.random(4, 30, groups, OWN);
            let host = draw_on_host(&weights, groups as usize, random());
            assert_eq!(host, draw_by_tensors(&weights, members, groups, random()), "{tokens}");
        }
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_alone() {
        let _alone = dflash_test_support::alone();
        tch::manual_seed(5);
        let logits = Tensor::randn([40, 700], (Kind::Float, Device::Cpu));
        let sampler = Sampler::new(Sampling::at(1.0), 7);
        let together = sampler.choose(&logits, 10);
        let one = |row: usize| sampler.choose(&logits.narrow(0, row as i64, 1), 10 + row)[0];
        assert_eq!((0..40).rev().map(one).collect::<Vec<_>>(), {
            let mut backwards = together.clone();
            backwards.reverse();
            backwards
        });
        assert_ne!(sampler.choose(&logits, 11), together);
        assert_ne!(Sampler::new(Sampling::at(1.0), 8).choose(&logits, 10), together);
        assert_ne!(Sampler::new(Sampling::at(5.0), 7).choose(&logits, 10), together);
        let greedy = Sampler::new(Sampling::GREEDY, 7).choose(&logits, 10);
        assert_eq!(Sampler::new(Sampling::at(0.001), 7).choose(&logits, 10), greedy);
    }

    /// Distributions at distance 0.2 agree in (1 - 0.2) / (1 + 0.2) to 1 - 0.2 of the draws.
    #[test]
    fn alike_distributions_mostly_draw_the_same_token() {
        let target = Tensor::from_slice(&[0.1, 0.4, 0.2, 0.3]).unsqueeze(0);
        let draft = Tensor::from_slice(&[0.2, 0.3, 0.3, 0.2]).unsqueeze(0);
        let sampler = Sampler::new(Sampling::at(1.0), 7);
        let draws = |weights: &Tensor| sampler.draw(&weights.expand([20_000, 4], false), 0, OWN);
        let (own, proposed) = (draws(&target), draws(&draft));
        let agree = own.iter().zip(&proposed).filter(|(own, proposed)| own == proposed).count();
        let share = agree as f64 / 20_000.0;
        assert!((0.66..0.81).contains(&share), "{share}");
    }

    /// Here 1 - 0.2 of the proposals are kept, and texts have the target's distribution.
    #[test]
    fn rejection_keeps_what_two_distributions_share() {
        let shares = [0.1, 0.4, 0.2, 0.3];
        let target = Tensor::from_slice(&shares).unsqueeze(0);
        let draft = Tensor::from_slice(&[0.2, 0.3, 0.3, 0.2]).unsqueeze(0);
        let sampler = Sampler::new(Sampling::at(1.0), 8).accepting_by(AcceptanceRule::Rejection);
        let logits_bv = target.log().expand([2, 4], false);
        let (mut kept, mut counts) = (0, [0; 4]);
        let texts = 20_000;
        for position in 0..texts {
            let proposed = sampler.propose(draft.shallow_clone(), position);
            let own = sampler.verify(&proposed.ids, proposed.shares.as_ref(), &logits_bv, position);
            kept += own.len() - 1;
            assert!(own.len() == 1 || own[0] == proposed.ids[0], "{own:?} {proposed:?}");
            counts[own[0] as usize] += 1;
        }
        let share = |count: usize| count as f64 / texts as f64;
        assert!((share(kept) - 0.8).abs() < 0.01, "{}", share(kept));
        for (count, expected) in counts.into_iter().zip(shares) {
            // Three standard deviations; one of twelve seeds deviates by three and a half.
            assert!((share(count) - expected).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn filters_keep_the_most_likely_and_their_proportions() {
        let logits = Tensor::from_slice(&[0.1f64, 0.4, 0.2, 0.3]).log().unsqueeze(0);
        let check = |sampling: Sampling, expect: [f64; 4]| {
            let found: Vec<f64> = Vec::try_from(sampling.distributions(&logits).get(0)).unwrap();
            let apart = found.iter().zip(expect).map(|(found, expect)| (found - expect).abs());
            assert!(apart.fold(0.0, f64::max) < 1e-12, "{sampling:?}: {found:?}");
        };
        let all = Sampling::at(1.0);
        check(all, [0.1, 0.4, 0.2, 0.3]);
        check(Sampling { top_k: Some(2), ..all }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        check(Sampling { top_k: Some(9), ..all }, [0.1, 0.4, 0.2, 0.3]);
        // 0.4 is less than half, 0.4 + 0.3 is not.
        check(Sampling { top_p: 0.5, ..all }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        check(Sampling { top_p: 0.3, ..all }, [0.0, 1.0, 0.0, 0.0]);
        check(Sampling { top_p: 1e-9, ..all }, [0.0, 1.0, 0.0, 0.0]);
        check(Sampling { min_p: 0.74, ..all }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        check(Sampling { min_p: 0.76, ..all }, [0.0, 1.0, 0.0, 0.0]);
        check(Sampling { min_p: 0.6, top_p: 0.5, ..all }, [0.0, 1.0, 0.0, 0.0]);
        // Among the three that top-k keeps, 4/9 is less than half.
        let both = Sampling { top_p: 0.5, top_k: Some(3), ..all };
        check(both, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    }

    #[test]
    fn of_equal_tokens_the_filters_keep_the_first() {
        let logits = Tensor::zeros([1, 5], (Kind::Float, tch::Device::Cpu));
        let sampling = Sampling { top_k: Some(2), ..Sampling::at(0.7) };
        let found: Vec<f64> = Vec::try_from(sampling.distributions(&logits).get(0)).unwrap();
        assert_eq!(found, [0.5, 0.5, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn the_first_of_equal_logits_is_the_most_likely() {
        let mut logits = vec![0.25f32; 3 * 1000];
        for (row, at) in [(0, 400), (0, 700), (1, 999), (2, 0)] {
            logits[row * 1000 + at] = 2.0;
        }
        let chosen = most_likely(&Tensor::from_slice(&logits).view([3, 1000]));
        assert_eq!(Vec::<i64>::try_from(chosen).unwrap(), [400, 999, 0]);
    }
}
