//! Chooses how many tokens to propose: as many as pay, given what passes cost here and what was
//! accepted.
//!
//! A step that verifies `k` proposals of a sequence yields one token plus, for each slot, the
//! probability that it and all before it are accepted. Steps of all sizes are timed as they run, so
//! a busy machine or a long context is noticed. Acceptance probabilities are estimated from all
//! sequences, shifted by what this sequence had lately. One threshold on a slot's probability
//! serves all sequences of a step; of a dozen thresholds, none included, the one with the most
//! tokens per second is taken. The text is the same whatever is chosen.

use dflash_settings::Speculate;

/// Rows, or drafting sequences, of the passes whose times are kept.
const KNOTS: [usize; 16] = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024];
/// How many measurements a size's time is the mean of at most, and as how many the time counts that lies
/// between those of its neighbours.
const MOST_WEIGHT: f64 = 30.0;
const BETWEEN: f64 = 3.0;
/// What of a measurement's surprise, as a power, all sizes share.
const COMMON: f64 = 0.1;
/// After so many steps without a measurement a time counts half, after twice as many a third: what was
/// slow once is tried again.
const OLD: f64 = 2000.0;
/// A measurement says no more than so many times what was known: a thread may have waited.
const LONGEST: f64 = 2.0;
/// What is thought of a slot before it was tried, and with the weight of how many tries.
const PRIOR: (f64, f64) = (0.75, 4.0);
/// What of the counts over all sequences remains after a block, and of a sequence's own after a block of
/// its own and after a step without one.
const KEPT: f64 = 0.99;
const KEPT_OWN: f64 = 0.85;
const KEPT_IDLE: f64 = 0.995;
/// Weight of the expectation beside a sequence's own proposals.
const OWN_WEIGHT: f64 = 2.5;
/// Share of the time that blocks may cost which are tried because none was for long.
const TRIALS: f64 = 0.005;
/// By how much proposals must pay for a sequence to begin with a draft's context, whose prompt costs time;
/// and of those that begin without, one in so many has it all the same, so that it is known when they pay.
const WORTH: f64 = 1.03;
const TRIED: usize = 8;
/// Chances below which slots are left out, tried one after the other where many sequences share a step.
const CUTS: [f64; 12] = [0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9];

/// What a step took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cost {
    /// Rows that were verified, and sequences for which a draft ran.
    pub(super) rows: usize,
    pub(super) drafting: usize,
    /// Seconds of the one and of the other.
    pub(super) verify: f64,
    pub(super) draft: f64,
}

/// What a sequence accepted lately.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Acceptance {
    /// Proposals that were looked at, accepted, and accepted on average over all sequences; all fading.
    reached: f64,
    accepted: f64,
    expected: f64,
    /// Steps since the last block.
    idle: usize,
}

/// A sequence before its step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    /// Its place among all sequences.
    pub(super) at: usize,
    pub(super) acceptance: Acceptance,
    /// Proposals at most, and as chosen.
    pub(super) most: usize,
    pub(super) proposals: usize,
    /// Where they are a trial, the seconds that each accepted one saves.
    pub(super) saving: f64,
}

/// Chooses lengths.
#[derive(Debug)]
pub(super) struct Lengths {
    speculate: Speculate,
    /// Whether proposals cost a pass of a draft.
    drafts: bool,
    verify: Times,
    draft: Times,
    /// Of each slot over all sequences: how often it was looked at, and accepted; fading.
    slots: Vec<(f64, f64)>,
    /// Seconds that trials may still cost.
    credit: f64,
    /// What a step with a trial is to take, which has not been timed yet.
    trial: Option<f64>,
    /// Sequences that did not seem worth a draft's context.
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

    /// Proposals of a block at most.
    pub(super) fn most(&self) -> usize {
        match self.speculate {
            Speculate::Auto => self.slots.len(),
            Speculate::Off => 0,
            Speculate::Tokens(tokens) => tokens.min(self.slots.len()),
        }
    }

    /// Whether a sequence that begins as one of so many is to have a draft's context.
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

    /// From here on steps are those of real sequences; before, the first ones of each size warmed caches,
    /// pages and threads up, and the fastest one counts.
    pub(super) fn started(&mut self) {
        self.verify.is_warm = true;
        self.draft.is_warm = true;
        self.credit = 0.0;
    }

    /// Keeps what a step took.
    pub(super) fn timed(&mut self, cost: Cost) {
        self.verify.see(cost.rows, cost.verify);
        self.draft.see(cost.drafting, cost.draft);
        let seconds = cost.verify + cost.draft;
        self.credit += TRIALS * seconds;
        if let Some(expected) = self.trial.take() {
            // A context that fell behind while nothing was proposed makes a trial dearer than a block.
            self.credit -= seconds - expected;
        }
    }

    /// Keeps how many of a sequence's proposals were accepted.
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

    /// Of each slot the share of steps that accept it among those that come so far, over all sequences.
    fn shares(&self) -> impl Iterator<Item = f64> + '_ {
        self.slots.iter().scan(PRIOR.0, |before, (reached, accepted)| {
            *before = (accepted + PRIOR.1 * *before) / (reached + PRIOR.1);
            Some(*before)
        })
    }

    /// Chooses the number of proposals of each sequence of a step.
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

    /// Tokens per second of a step in which each sequence has so many proposals.
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

    /// Seconds of a step of so many sequences with no proposals each, one and so on.
    pub(super) fn step_seconds(&self, sequences: usize) -> Vec<f64> {
        let of = |length: usize| {
            let drafting = if length > 0 { sequences } else { 0 };
            self.seconds(sequences * (1 + length), drafting)
        };
        if self.is_auto() { (0..=self.most()).map(of).collect() } else { Vec::new() }
    }

    fn seconds(&self, rows: usize, drafting: usize) -> f64 {
        let drafting = if self.drafts { drafting } else { 0 };
        // However old its time, no pass is faster than that of one row.
        self.verify.of(rows).max(self.verify.of(1)) + self.draft.of(drafting)
    }

    /// Lets the sequence that has gone without a block for longest try one, where the time for that has
    /// been saved. `value` is that of the step without.
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
            // What is accepted of it is paid back.
            let more = more(length);
            self.credit -= more;
            self.trial = Some(without + more);
            choice.proposals = length;
            choice.saving = 1.0 / value;
        }
    }
}

/// Of each slot of a sequence the chance that it and all before it are accepted.
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

    /// Tokens that a step with so many proposals makes.
    fn tokens(&self, proposals: usize) -> f64 {
        1.0 + self.0[..proposals].iter().sum::<f64>()
    }

    /// Slots whose chance is `cut` at least.
    fn above(&self, cut: f64) -> usize {
        self.0.iter().take_while(|&&chance| chance >= cut).count()
    }
}

/// Seconds of passes of each size: what one takes beside the others, times what all take now.
#[derive(Debug)]
struct Times {
    known: [Option<Known>; KNOTS.len()],
    /// By what all passes are slower now than those that are known were.
    scale: f64,
    step: u64,
    is_warm: bool,
}

/// What a knot's passes took.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Seconds over [`Times::scale`].
    seconds: f64,
    /// Of how many measurements.
    weight: f64,
    /// The step of the last one.
    last: u64,
}

impl Default for Times {
    fn default() -> Self {
        Self { known: [None; KNOTS.len()], scale: 1.0, step: 0, is_warm: false }
    }
}

impl Times {
    /// Seconds for `size`; between what is known, and in proportion beyond.
    fn of(&self, size: usize) -> f64 {
        if size == 0 {
            return 0.0;
        }
        // Asked some dozen times a step, so only what is needed is aged.
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
                // What the last rows cost, and at least nothing.
                let slope = before.map_or(time / knot, |(other, earlier)| {
                    ((time - earlier) / (knot - other)).max(0.0)
                });
                time + slope * (size - knot)
            }
        }
    }

    /// A knot that is known, and its seconds.
    fn at(&self, number: usize) -> (f64, f64) {
        let known = self.known[number].expect("it is known");
        let age = (self.step - known.last) as f64;
        (KNOTS[number] as f64, self.scale * known.seconds / (1.0 + age / OLD))
    }

    /// Keeps a measurement.
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
            // A busy machine, or a longer context, is first of all slower for all sizes.
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

    /// A machine on which a pass takes `first` and `more` for each further row, and a draft `draft`.
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

        /// As an engine begins, which has timed some passes.
        fn lengths(&self, speculate: Speculate) -> Lengths {
            let mut lengths = Lengths::new(speculate, 7, true);
            for rows in [1, 2, 4, 8] {
                let verify = self.first + self.more * (rows - 1) as f64;
                // The first pass of a size waits for pages.
                for slower in [3.0, 1.0] {
                    let (verify, draft) = (slower * verify, slower * self.draft);
                    lengths.timed(Cost { rows, drafting: 1, verify, draft });
                }
            }
            lengths.started();
            lengths
        }

        /// Tokens per second of `steps` with sequences whose slots are accepted each at its rate, and the
        /// proposals chosen in the last steps. `slots` at most.
        fn run(&self, speculate: Speculate, rates: &[f64], steps: usize) -> (f64, Vec<usize>) {
            self.run_beside(speculate, rates, steps, 0.0)
        }

        /// The same where each step takes up to so many times longer, by chance.
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
                // What the machine does beside changes no best length, so the figure leaves it out.
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
        // As a target beyond the cache in float32: rows cost next to nothing, and the length that is
        // best is so by a few percent.
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
