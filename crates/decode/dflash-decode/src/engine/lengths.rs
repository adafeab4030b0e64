//! Chooses how many tokens to propose, from the measured cost of passes and the acceptance so far.
//!
//! A step that verifies `k` proposals of a sequence yields one token plus, for each slot, the
//! probability that it and all before it are accepted. Passes of all sizes are timed as they run,
//! so a busy machine or a long context is noticed. Acceptance probabilities are estimated over all
//! sequences and corrected by the sequence's recent acceptance. One probability threshold applies
//! to the slots of all sequences in a step; of a dozen thresholds, including no proposals, the one
//! with the highest predicted tokens per second is used. The choice does not affect the text.

use dflash_settings::Speculate;

/// Pass sizes, in rows or drafting sequences, whose times are tracked.
const KNOTS: [usize; 16] = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024];
/// Maximum number of measurements in a size's running mean, and the weight of an interpolated time.
const MOST_WEIGHT: f64 = 30.0;
const BETWEEN: f64 = 3.0;
/// Share of a measurement's deviation (as an exponent) that is attributed to all sizes.
const COMMON: f64 = 0.1;
/// A time's weight halves after this many steps without a measurement and falls to a third after
/// twice as many, so that sizes that were slow once are tried again.
const OLD: f64 = 2000.0;
/// A measurement counts as at most this multiple of the known time, since a thread may have waited.
const LONGEST: f64 = 2.0;
/// Prior acceptance probability of a slot, and its weight in observations.
const PRIOR: (f64, f64) = (0.75, 4.0);
/// Decay of the global counts per block, and of a sequence's own counts per block and per step
/// without one.
const KEPT: f64 = 0.99;
const KEPT_OWN: f64 = 0.85;
const KEPT_IDLE: f64 = 0.995;
/// Weight of the global expectation against a sequence's own proposals.
const OWN_WEIGHT: f64 = 2.5;
/// Share of time spent on trial blocks after a long time without proposals.
const TRIALS: f64 = 0.005;
/// Minimum predicted speedup for a new sequence to get a draft context, whose prompt costs time;
/// one in `TRIED` of the others gets one anyway, to keep the estimate current.
const WORTH: f64 = 1.03;
const TRIED: usize = 8;
/// Thresholds on acceptance probability, tried in turn if many sequences share a step.
const CUTS: [f64; 12] = [0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9];

/// Time of a step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cost {
    /// Verified rows, and sequences for which a draft ran.
    pub(super) rows: usize,
    pub(super) drafting: usize,
    /// Seconds of verification and of drafting.
    pub(super) verify: f64,
    pub(super) draft: f64,
}

/// Recent acceptance of a sequence.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Acceptance {
    /// Evaluated proposals, accepted ones, and the number expected from the average over all
    /// sequences; all with decay.
    reached: f64,
    accepted: f64,
    expected: f64,
    /// Steps since the last block.
    idle: usize,
}

/// A sequence in the choice for one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    /// Its index among all sequences.
    pub(super) at: usize,
    pub(super) acceptance: Acceptance,
    /// Maximum and chosen number of proposals.
    pub(super) most: usize,
    pub(super) proposals: usize,
    /// For a trial, the seconds saved per accepted proposal.
    pub(super) saving: f64,
}

/// Chooses the number of proposals.
#[derive(Debug)]
pub(super) struct Lengths {
    speculate: Speculate,
    /// Whether proposals need a draft pass.
    drafts: bool,
    verify: Times,
    draft: Times,
    /// Per slot over all sequences: evaluations and acceptances, with decay.
    slots: Vec<(f64, f64)>,
    /// Time budget for trials, in seconds.
    credit: f64,
    /// Predicted time of a step with a trial, until it is measured.
    trial: Option<f64>,
    /// Number of sequences for which a draft context did not seem worthwhile.
    unworthy: usize,
}

impl Lengths {
    pub(super) fn new(speculate: Speculate, most: usize, drafts: bool) -> Self {
        let slots = vec![(0.0, 0.0); most];
        let (verify, draft) = (Times::default(), Times::default());
        Self { speculate, drafts, verify, draft, slots, credit: 0.0, trial: None, unworthy: 0 }
    }

    pub(super) fn is_auto(&self) -> bool {
        self.speculate == Speculate::Auto
    }

    /// Maximum proposals per block.
    pub(super) fn most(&self) -> usize {
        match self.speculate {
            Speculate::Auto => self.slots.len(),
            Speculate::Off => 0,
            Speculate::Tokens(tokens) => tokens.min(self.slots.len()),
        }
    }

    /// Whether a new sequence, one of `sequences`, should get a draft context.
    pub(super) fn is_worth_context(&mut self, sequences: usize) -> bool {
        if !(self.is_auto() && self.drafts) {
            return true;
        }
        let shares: Vec<f64> = self.shares().collect();
        let most = shares.len();
        let any =
            Choice { at: 0, acceptance: Acceptance::default(), most, proposals: 0, saving: 0.0 };
        let all: Vec<Chances> = (0..sequences).map(|_| Chances::of(&any, &shares)).collect();
        let without = self.value(&all, |_| 0);
        if (1..=most).any(|length| self.value(&all, |_| length) > WORTH * without) {
            return true;
        }
        self.unworthy += 1;
        self.unworthy % TRIED == 1
    }

    /// Ends the warm-up. During warm-up the fastest pass of each size counts, since the first ones
    /// warm caches, pages and threads.
    pub(super) fn started(&mut self) {
        self.verify.is_warm = true;
        self.draft.is_warm = true;
        self.credit = 0.0;
    }

    /// Records the time of a step.
    pub(super) fn timed(&mut self, cost: Cost) {
        self.verify.see(cost.rows, cost.verify);
        self.draft.see(cost.drafting, cost.draft);
        let seconds = cost.verify + cost.draft;
        self.credit += TRIALS * seconds;
        if let Some(expected) = self.trial.take() {
            // Catching up the context after steps without proposals makes a trial cost more than a
            // block.
            self.credit -= seconds - expected;
        }
    }

    /// Records how many of a sequence's proposals were accepted.
    pub(super) fn verified(
        &mut self,
        own: &mut Acceptance,
        choice: &Choice,
        proposed: usize,
        accepted: usize,
    ) {
        self.credit += choice.saving * accepted as f64;
        let kept = if proposed > 0 { KEPT_OWN } else { KEPT_IDLE };
        own.idle = if proposed > 0 { 0 } else { own.idle + 1 };
        own.reached *= kept;
        own.accepted *= kept;
        own.expected *= kept;
        let looked_at = proposed.min(accepted + 1);
        if looked_at > 0 {
            own.reached += looked_at as f64;
            own.accepted += accepted as f64;
            own.expected += self.shares().take(looked_at).sum::<f64>();
        }
        for (slot, counts) in self.slots.iter_mut().take(looked_at).enumerate() {
            let was_accepted = f64::from(u8::from(slot < accepted));
            *counts = (KEPT * counts.0 + 1.0, KEPT * counts.1 + was_accepted);
        }
    }

    /// Acceptance rate per slot given that all earlier ones were accepted, over all sequences.
    fn shares(&self) -> impl Iterator<Item = f64> + '_ {
        self.slots.iter().scan(PRIOR.0, |before, (reached, accepted)| {
            *before = (accepted + PRIOR.1 * *before) / (reached + PRIOR.1);
            Some(*before)
        })
    }

    /// Chooses the number of proposals for each sequence of a step.
    pub(super) fn choose(&mut self, choices: &mut [Choice]) {
        let most = self.most();
        for choice in &mut *choices {
            choice.most = choice.most.min(most);
            choice.proposals = choice.most;
        }
        if !self.is_auto() || self.slots.is_empty() || choices.is_empty() {
            return;
        }
        let shares: Vec<f64> = self.shares().collect();
        let chances: Vec<Chances> =
            choices.iter().map(|choice| Chances::of(choice, &shares)).collect();
        let mut best = self.value(&chances, |_| 0);
        choices.iter_mut().for_each(|choice| choice.proposals = 0);
        let mut try_lengths = |length: &dyn Fn(&Chances) -> usize| {
            let value = self.value(&chances, length);
            if value > best {
                best = value;
                for (choice, chances) in choices.iter_mut().zip(&chances) {
                    choice.proposals = length(chances);
                }
            }
        };
        match chances.as_slice() {
            [one] => (1..=one.0.len()).for_each(|length| try_lengths(&|_| length)),
            _ => CUTS.iter().for_each(|&cut| try_lengths(&|chances| chances.above(cut))),
        }
        self.try_again(choices, &chances, best);
    }

    /// Predicted tokens per second of a step with the given number of proposals per sequence.
    fn value(&self, chances: &[Chances], length: impl Fn(&Chances) -> usize) -> f64 {
        let (mut tokens, mut rows, mut drafting) = (0.0, 0, 0);
        for one in chances {
            let length = length(one);
            tokens += one.tokens(length);
            rows += 1 + length;
            drafting += usize::from(length > 0);
        }
        tokens / self.seconds(rows, drafting).max(1e-9)
    }

    /// Predicted seconds of a step of `sequences` sequences with 0, 1, ... proposals each.
    pub(super) fn step_seconds(&self, sequences: usize) -> Vec<f64> {
        let of = |length: usize| {
            let drafting = if length > 0 { sequences } else { 0 };
            self.seconds(sequences * (1 + length), drafting)
        };
        if self.is_auto() { (0..=self.most()).map(of).collect() } else { Vec::new() }
    }

    fn seconds(&self, rows: usize, drafting: usize) -> f64 {
        let drafting = if self.drafts { drafting } else { 0 };
        // No pass is faster than one with a single row, even if that time is old.
        self.verify.of(rows).max(self.verify.of(1)) + self.draft.of(drafting)
    }

    /// Lets the sequence with the longest time without a block try one, if the trial budget allows.
    /// `value` is the tokens per second without it.
    fn try_again(&mut self, choices: &mut [Choice], chances: &[Chances], value: f64) {
        if self.credit <= 0.0 {
            return;
        }
        let idle = |choice: &&mut Choice| match (choice.proposals, choice.most) {
            (_, 0) | (1.., _) => 0,
            _ => choice.acceptance.idle,
        };
        let (rows, drafting) = choices.iter().fold((0, 0), |(rows, drafting), choice| {
            (rows + 1 + choice.proposals, drafting + usize::from(choice.proposals > 0))
        });
        let Some((number, choice)) = choices.iter_mut().enumerate().max_by_key(|(_, c)| idle(c))
        else {
            return;
        };
        if idle(&choice) == 0 {
            return;
        }
        let without = self.seconds(rows, drafting);
        let more = |length: usize| self.seconds(rows + length, drafting + 1) - without;
        let loss = |length: usize| more(length) - (chances[number].tokens(length) - 1.0) / value;
        let best = (1..=choice.most).min_by(|&a, &b| loss(a).total_cmp(&loss(b)));
        if let Some(length) = best.filter(|&length| loss(length).max(0.0) <= self.credit) {
            // Accepted proposals are credited back.
            let more = more(length);
            self.credit -= more;
            self.trial = Some(without + more);
            choice.proposals = length;
            choice.saving = 1.0 / value;
        }
    }
}

/// For each slot of a sequence, the probability that it and all before it are accepted.
struct Chances(Vec<f64>);

impl Chances {
    fn of(choice: &Choice, shares: &[f64]) -> Self {
        let own = &choice.acceptance;
        let shift = (own.accepted - own.expected) / (own.reached + OWN_WEIGHT);
        let chance = |all: &mut f64, share: &f64| {
            *all *= (share + shift).clamp(0.01, 0.99);
            Some(*all)
        };
        Self(shares.iter().take(choice.most).scan(1.0, chance).collect())
    }

    /// Expected tokens of a step with `proposals` proposals.
    fn tokens(&self, proposals: usize) -> f64 {
        1.0 + self.0[..proposals].iter().sum::<f64>()
    }

    /// Number of leading slots with at least probability `cut`.
    fn above(&self, cut: f64) -> usize {
        self.0.iter().take_while(|&&chance| chance >= cut).count()
    }
}

/// Times of passes by size: relative times, and a common scale for the current speed.
#[derive(Debug)]
struct Times {
    known: [Option<Known>; KNOTS.len()],
    /// Current slowdown of all passes relative to the known times.
    scale: f64,
    step: u64,
    is_warm: bool,
}

/// Time of one knot's passes.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Seconds divided by [`Times::scale`].
    seconds: f64,
    /// Number of measurements.
    weight: f64,
    /// Step of the last measurement.
    last: u64,
}

impl Default for Times {
    fn default() -> Self {
        Self { known: [None; KNOTS.len()], scale: 1.0, step: 0, is_warm: false }
    }
}

impl Times {
    /// Seconds for `size`: interpolated between knots, and proportional beyond.
    fn of(&self, size: usize) -> f64 {
        if size == 0 {
            return 0.0;
        }
        // Called some dozen times per step, so only the needed entries are aged.
        let known = |number: &usize| self.known[*number].is_some();
        let upper = KNOTS.partition_point(|knot| *knot <= size);
        let below = (0..upper).rev().find(known);
        let above = (upper..KNOTS.len()).find(known);
        let size = size as f64;
        match (below, above) {
            (None, None) => 0.0,
            (None, Some(above)) => self.at(above).1,
            (Some(below), Some(above)) => {
                let ((knot, time), (next, later)) = (self.at(below), self.at(above));
                time + (later - time) * (size - knot) / (next - knot)
            }
            (Some(below), None) => {
                let (knot, time) = self.at(below);
                let before = (0..below).rev().find(known).map(|before| self.at(before));
                // The marginal cost of the last rows, at least zero.
                let slope = before.map_or(time / knot, |(other, earlier)| {
                    ((time - earlier) / (knot - other)).max(0.0)
                });
                time + slope * (size - knot)
            }
        }
    }

    /// A known knot and its seconds.
    fn at(&self, number: usize) -> (f64, f64) {
        let known = self.known[number].expect("it is known");
        let age = (self.step - known.last) as f64;
        (KNOTS[number] as f64, self.scale * known.seconds / (1.0 + age / OLD))
    }

    /// Records a measurement.
    fn see(&mut self, size: usize, seconds: f64) {
        self.step += 1;
        if size == 0 {
            return;
        }
        let nearest = |(_, knot): &(usize, &usize)| knot.abs_diff(size);
        let (number, &knot) = KNOTS.iter().enumerate().min_by_key(nearest).expect("there are some");
        let (expected, of_knot) = (self.of(size), self.of(knot));
        let (mut ratio, mut before) = (1.0, seconds);
        if expected > 0.0 {
            ratio = (seconds / expected).min(LONGEST);
            before = of_knot;
        }
        if self.is_warm {
            // A busy machine or a longer context slows all sizes first.
            self.scale *= ratio.powf(COMMON);
        }
        let measured = ratio * before / self.scale;
        let known = self.known[number].unwrap_or(Known {
            seconds: before / self.scale,
            weight: if expected > 0.0 { BETWEEN } else { 0.0 },
            last: self.step,
        });
        let seconds = match self.is_warm || known.weight == 0.0 {
            true => known.seconds + (measured - known.seconds) / (known.weight + 1.0),
            false => measured.min(known.seconds),
        };
        let weight = (known.weight + 1.0).min(MOST_WEIGHT);
        self.known[number] = Some(Known { seconds, weight, last: self.step });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a pass takes `first` plus `more` per further row, and a draft `draft`.
    struct Machine {
        first: f64,
        more: f64,
        draft: f64,
    }

    impl Machine {
        fn cost(&self, choices: &[Choice]) -> Cost {
            let rows: usize = choices.iter().map(|choice| 1 + choice.proposals).sum();
            let drafting = choices.iter().filter(|choice| choice.proposals > 0).count();
            let verify = self.first + self.more * (rows - 1) as f64;
            Cost { rows, drafting, verify, draft: self.draft * drafting as f64 }
        }

        /// State of an engine that has timed some passes.
        fn lengths(&self, speculate: Speculate) -> Lengths {
            let mut lengths = Lengths::new(speculate, 7, true);
            for rows in [1, 2, 4, 8] {
                let verify = self.first + self.more * (rows - 1) as f64;
                // The first pass of a size is slowed by page faults.
                for slower in [3.0, 1.0] {
                    let (verify, draft) = (slower * verify, slower * self.draft);
                    lengths.timed(Cost { rows, drafting: 1, verify, draft });
                }
            }
            lengths.started();
            lengths
        }

        /// Tokens per second over `steps` with sequences whose slots are accepted at the given
        /// rates, and the proposals chosen in the last steps; at most `slots`.
        fn run(&self, speculate: Speculate, rates: &[f64], steps: usize) -> (f64, Vec<usize>) {
            self.run_beside(speculate, rates, steps, 0.0)
        }

        /// The same with each step randomly up to (1 + `longer`) times slower.
        fn run_beside(
            &self,
            speculate: Speculate,
            rates: &[f64],
            steps: usize,
            longer: f64,
        ) -> (f64, Vec<usize>) {
            let mut lengths = self.lengths(speculate);
            let mut own = vec![Acceptance::default(); rates.len()];
            let (mut tokens, mut seconds, mut state) = (0.0, 0.0, 1u64);
            let mut uniform = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 11) as f64 / (1u64 << 53) as f64
            };
            let mut last = Vec::new();
            for _ in 0..steps {
                let choice = |(at, &acceptance): (usize, &Acceptance)| Choice {
                    at,
                    acceptance,
                    most: 7,
                    proposals: 0,
                    saving: 0.0,
                };
                let mut choices: Vec<Choice> = own.iter().enumerate().map(choice).collect();
                lengths.choose(&mut choices);
                let cost = self.cost(&choices);
                // Random slowdown does not change the best length, so the result excludes it.
                let slower = 1.0 + longer * uniform().powi(3);
                let (verify, draft) = (slower * cost.verify, slower * cost.draft);
                lengths.timed(Cost { verify, draft, ..cost });
                seconds += cost.verify + cost.draft;
                for choice in &choices {
                    let rate = rates[choice.at];
                    let accepted = (0..choice.proposals).take_while(|_| uniform() < rate).count();
                    tokens += 1.0 + accepted as f64;
                    lengths.verified(&mut own[choice.at], choice, choice.proposals, accepted);
                }
                last = choices.iter().map(|choice| choice.proposals).collect();
            }
            (tokens / seconds, last)
        }

        fn best_fixed(&self, rates: &[f64], steps: usize) -> f64 {
            let lengths = std::iter::once(Speculate::Off).chain((1..=7).map(Speculate::Tokens));
            let each = lengths.map(|speculate| self.run(speculate, rates, steps).0);
            each.fold(0.0, f64::max)
        }
    }

    #[test]
    fn the_length_chosen_is_nearly_as_good_as_the_best_fixed_one() {
        let in_cache = Machine { first: 1.0, more: 0.6, draft: 1.5 };
        let beyond = Machine { first: 10.0, more: 0.3, draft: 2.0 };
        for (machine, least) in [(&in_cache, 0.975), (&beyond, 0.97)] {
            for rate in [0.05, 0.3, 0.6, 0.8, 0.95] {
                let (auto, last) = machine.run(Speculate::Auto, &[rate], 3000);
                let best = machine.best_fixed(&[rate], 3000);
                assert!(auto > least * best, "rate {rate}: {auto} of {best}, {last:?}");
            }
        }
    }

    #[test]
    fn a_busy_machine_hides_no_length() {
        // Like a float32 target larger than the cache: rows are nearly free, and the best length is
        // best by only a few percent.
        let flat = Machine { first: 23.0, more: 0.1, draft: 1.0 };
        for rate in [0.6, 0.7, 0.8, 0.9] {
            let (auto, last) = flat.run_beside(Speculate::Auto, &[rate], 300, 0.8);
            let best = flat.best_fixed(&[rate], 300);
            assert!(auto > 0.97 * best, "rate {rate}: {auto} of {best}, {last:?}");
        }
    }

    #[test]
    fn sequences_of_one_step_have_lengths_of_their_own() {
        let machine = Machine { first: 10.0, more: 0.8, draft: 1.0 };
        let rates = [0.95, 0.95, 0.02, 0.02];
        let (auto, last) = machine.run(Speculate::Auto, &rates, 3000);
        assert!(last[0] > 4 && last[1] > 4 && last[2] < 2 && last[3] < 2, "{last:?}");
        let best = machine.best_fixed(&rates, 3000);
        assert!(auto > 1.02 * best, "{auto} of {best}");
    }

    #[test]
    fn a_bad_phase_is_left_again() {
        let machine = Machine { first: 10.0, more: 0.3, draft: 2.0 };
        let mut lengths = machine.lengths(Speculate::Auto);
        let mut own = Acceptance::default();
        let mut chosen = Vec::new();
        for step in 0..600 {
            let mut choices =
                [Choice { at: 0, acceptance: own, most: 7, proposals: 0, saving: 0.0 }];
            lengths.choose(&mut choices);
            lengths.timed(machine.cost(&choices));
            let proposals = choices[0].proposals;
            let accepted = if (100..300).contains(&step) { 0 } else { proposals };
            lengths.verified(&mut own, &choices[0], proposals, accepted);
            chosen.push(proposals);
        }
        let mean = |steps: std::ops::Range<usize>| {
            chosen[steps.clone()].iter().sum::<usize>() as f64 / steps.len() as f64
        };
        assert!(mean(50..100) > 6.0 && mean(200..300) < 0.5 && mean(500..600) > 5.0, "{chosen:?}");
    }

    #[test]
    fn a_context_is_made_where_proposals_pay_and_now_and_then_where_not() {
        let made = |machine: &Machine| {
            let mut lengths = machine.lengths(Speculate::Auto);
            (0..32).filter(|_| lengths.is_worth_context(4)).count()
        };
        assert_eq!(made(&Machine { first: 50.0, more: 0.3, draft: 1.0 }), 32);
        assert_eq!(made(&Machine { first: 1.0, more: 0.9, draft: 2.0 }), 32 / TRIED);
    }

    #[test]
    fn fixed_lengths_are_what_was_asked() {
        let check = |speculate, expect: [usize; 2]| {
            let mut lengths = Lengths::new(speculate, 7, true);
            let choice = |most| Choice {
                at: 0,
                acceptance: Acceptance::default(),
                most,
                proposals: 0,
                saving: 0.0,
            };
            let mut choices = [choice(7), choice(2)];
            lengths.choose(&mut choices);
            assert_eq!(choices.map(|choice| choice.proposals), expect);
        };
        check(Speculate::Off, [0, 0]);
        check(Speculate::Tokens(3), [3, 2]);
        check(Speculate::Tokens(99), [7, 2]);
    }
}
