//! Whether what a run has trained is worth keeping.
//!
//! A state is ruined when a number in it is not finite, when a weight is far beyond what any draft's
//! weights are, or when the loss is far above that of guessing and above that of the run's beginning.
//! The last shows only in the step after: a checkpoint is held to be good once the step after it was.
//!
//! A run that has had its chance and has not come down to what guessing has is ruined too, however high it
//! began ([`Health::lost_chance`]).

use dflash_draft::loss_of_guesses;
use dflash_run::Position;

use crate::prepared::Prepared;

/// Weights of drafts, norms included, stay below a hundred.
const LARGEST_WEIGHT: f64 = 1e3;

/// A loss of this many times that of guessing is no fluctuation.
const ABOVE_GUESSING: f64 = 3.0;

/// The loss of fresh weights is often above that (41 with the 4096 tokens of a small target, where
/// guessing has 8): a run that has gone wrong is above its own beginning too.
const ABOVE_FIRST: f64 = 1.5;

/// Times the loss of guessing that the recent losses of a run that had its chance may have.
const STILL_ABOVE: f64 = 1.5;

/// Steps whose mean loss is compared with that of as many before: the mean of so many rows differs by one
/// percent or so from the next.
const RECENT: usize = 8;

/// Losses that are remembered: two times as many.
const REMEMBERED: usize = 2 * RECENT;

/// A run that rose so far above its first loss was thrown off, not slow to begin: the losses of fresh weights
/// differ by a few percent from row to row.
const THROWN_OFF: f64 = 1.2;

/// The default of --lr, which the paper trained with: fresh weights come down to guessing in some dozens of steps
/// at it, and a higher one is the first suspect.
pub(super) const USUAL_RATE: f64 = 6e-4;

/// Steps after which every healthy run is below guessing, if their rates are the usual one on average; some
/// dozens are enough.
const CHANCE: u32 = 100;

/// The rates of those steps, added up: how far an optimizer may have moved a weight in them. A step with such a
/// rate leaves nothing of fresh weights, whose deviation is a third of it.
const FAR: f64 = CHANCE as f64 * USUAL_RATE;

/// A loss that is not below this share of that of the steps before stands still. A healthy one falls by several
/// percent in [`RECENT`] steps at a tenth of the usual rate.
const STANDS_STILL: f64 = 0.99;

/// What the losses say of the run so far, the same on all ranks.
pub(super) struct Health {
    /// The loss of a draft that gives every token the same probability, nats, by the terms of the objective
    /// and of the head.
    ignorance: f64,
    /// Over the steps since the last checkpoint that moved something.
    sum: f64,
    moved: u64,
    /// The last checkpoint, until the step after it shows that it is good.
    pub(super) unproven: Option<u64>,
    /// The last checkpoint that is known to be good.
    pub(super) good: Option<u64>,
    /// Steps of this process that were not finite, and the last of them.
    pub(super) bad: u64,
    pub(super) last_bad: u64,
    /// Whether any step of this process moved something.
    pub(super) has_moved: bool,
    /// A checkpoint whose weights are sound, with which the run got nowhere.
    pub(super) stuck: Option<u64>,
    /// What is wrong with the weights of the last state that was to be saved.
    pub(super) ruin: Option<String>,
}

/// What all ranks find in their shares of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weights {
    Sound,
    TooLarge,
    NotFinite,
}

impl Health {
    pub(super) fn begin(prepared: &Prepared<'_>, position: &Position) -> Self {
        let objective = &prepared.config.settings.objective;
        let pruned = prepared.config.draft.vocab_size;
        let tokens = pruned.unwrap_or(prepared.target.vocab_size as usize);
        let unproven = prepared.resume.as_ref().filter(|it| !it.is_diverged()).map(|it| it.step);
        debug_assert!(unproven.is_none_or(|step| step == position.step));
        Self {
            ignorance: objective.loss_of_guesses(tokens) + loss_of_guesses(&prepared.draft),
            sum: 0.0,
            moved: 0,
            unproven,
            good: None,
            bad: 0,
            last_bad: 0,
            has_moved: false,
            stuck: None,
            ruin: None,
        }
    }

    /// Adds the loss of a step that moved something at a `rate`; the checkpoint before it that it shows to be
    /// ruined, if it does.
    pub(super) fn add(&mut self, loss: f64, rate: f64, position: &mut Position) -> Option<u64> {
        position.first_loss.get_or_insert(loss);
        let highest = position.highest_loss.get_or_insert(loss);
        *highest = highest.max(loss);
        position.lr_sum += rate;
        // What is not finite could not be read back from a state.
        position.recent_losses.extend(Some(loss).filter(|loss| loss.is_finite()));
        let excess = position.recent_losses.len().saturating_sub(REMEMBERED);
        position.recent_losses.drain(..excess);
        self.sum += loss;
        self.moved += 1;
        self.has_moved = true;
        let saved = self.unproven.take()?;
        if self.is_exploded(loss, position) {
            return Some(saved);
        }
        self.good = Some(saved);
        None
    }

    /// Notes a step that was not finite; whether to say so. The first are said, and then ever fewer.
    pub(super) fn add_bad(&mut self, step: u64) -> bool {
        self.bad += 1;
        self.last_bad = step;
        self.bad <= 3 || self.bad.is_power_of_two()
    }

    /// Whether nothing has moved since the last checkpoint, or since this process began.
    pub(super) fn is_unmoved(&self) -> bool {
        self.moved == 0
    }

    /// What is wrong with a state of these weights, if something is. At the run's `end` few losses must do.
    pub(super) fn judge(
        &self,
        weights: Weights,
        position: &Position,
        rate: f64,
        is_end: bool,
    ) -> Option<String> {
        let mean = self.sum / self.moved as f64;
        match weights {
            Weights::NotFinite => Some("the weights are not finite".to_owned()),
            Weights::TooLarge => Some(format!("weights are beyond {LARGEST_WEIGHT}")),
            Weights::Sound if self.moved > 0 && self.is_exploded(mean, position) => {
                let (first, ignorance) = (position.first_loss.unwrap_or(f64::NAN), self.ignorance);
                Some(format!(
                    "the loss is {mean:.4}, which was {first:.4} in the first step and is {ignorance:.4} for guessing"
                ))
            }
            Weights::Sound if self.moved > 0 => self.lost_chance(position, rate, is_end),
            Weights::Sound => None,
        }
    }

    /// What to say of a first `loss` far above that of guessing.
    pub(super) fn opening_note(&self, loss: f64) -> Option<String> {
        let ignorance = self.ignorance;
        (loss > STILL_ABOVE * ignorance).then(|| {
            format!(
                "the loss of step 1, {loss:.2}, is above that of guessing ({ignorance:.2}), as usual: initial weights are confident and wrong, which some dozens of steps correct"
            )
        })
    }

    /// What to say at the end of a run that is not ruined and has still not come down to guessing.
    pub(super) fn closing_note(&self, position: &Position) -> Option<String> {
        let (recent, ignorance) = (mean(windows(&position.recent_losses).1), self.ignorance);
        (self.has_moved && recent > ignorance).then(|| {
            format!(
                "the loss, {recent:.2} at the end, is above that of guessing ({ignorance:.2}): the draft \
                 proposes no better than chance; train longer, or at another --lr"
            )
        })
    }

    /// How a run has missed its chance, if it has: a loss that stays above [`STILL_ABOVE`] times that of guessing
    /// is no success, whatever the first loss was. Fresh weights may begin at five times guessing, so a healthy run
    /// is above it too until it has had its chance, which is over
    ///
    /// - when the loss rose to [`THROWN_OFF`] times the first: a rate that is too high threw the weights off;
    /// - after [`CHANCE`] steps whose rates add up to those of as many at the usual rate, whatever the loss does;
    /// - when the loss stands still ([`STANDS_STILL`]) at no less than half the usual rate. At a lower one, as at
    ///   the end of a schedule, it stands still in a healthy run too. Of fewer than [`REMEMBERED`] steps, whose
    ///   losses say less, this is asked where each step went as far as a healthy run ([`FAR`]).
    ///
    /// A run of which none is true is short or slow and gets [`Self::closing_note`]. Before [`RECENT`] steps the
    /// loss may be on its way, so only the run's end is judged by fewer.
    fn lost_chance(&self, position: &Position, rate: f64, is_end: bool) -> Option<String> {
        let (losses, ignorance) = (&position.recent_losses, self.ignorance);
        let is_judged = losses.len() >= RECENT || is_end && losses.len() > 1;
        let (before, recent) = windows(losses);
        let (now, last) = (mean(recent), recent.len());
        if !is_judged || now <= STILL_ABOVE * ignorance {
            return None;
        }
        let first = position.first_loss.unwrap_or(f64::INFINITY);
        let highest = position.highest_loss.unwrap_or_default();
        let steps = position.optimizer_steps() as f64;
        let could_move = match losses.len() {
            REMEMBERED => rate >= USUAL_RATE / 2.0,
            _ => position.lr_sum >= FAR * steps,
        };
        let how = if highest > THROWN_OFF * first {
            format!("it rose from {first:.4} to {highest:.4}")
        } else if steps >= CHANCE.into() && position.lr_sum >= FAR {
            format!(
                "{steps} steps with a learning rate of {:.1e} are enough",
                position.lr_sum / steps
            )
        } else if could_move && now > STANDS_STILL * mean(before) {
            format!("it stands still, and was {:.4} before", mean(before))
        } else {
            return None;
        };
        let over = if last == 1 { "step".to_owned() } else { format!("{last} steps") };
        Some(format!(
            "the loss of the last {over} is {now:.4}, where guessing has {ignorance:.4}: {how}"
        ))
    }

    /// Notes a checkpoint of `step`, good by what is known, or ruined.
    pub(super) fn saved(&mut self, step: u64, ruin: Option<String>) {
        (self.sum, self.moved) = (0.0, 0);
        if ruin.is_none() {
            self.good = self.unproven.take().or(self.good);
            self.unproven = Some(step);
        }
        self.ruin = ruin;
    }

    /// The last checkpoint that is good, as far as is known.
    pub(super) fn last_good(&self) -> Option<u64> {
        self.unproven.or(self.good)
    }

    fn is_exploded(&self, loss: f64, position: &Position) -> bool {
        let first = position.first_loss.unwrap_or_default();
        !loss.is_finite() || loss > (ABOVE_GUESSING * self.ignorance).max(ABOVE_FIRST * first)
    }
}

/// The last of `losses`, and as many before them: [`RECENT`], or of fewer than [`REMEMBERED`] a quarter, so that the
/// high losses of the first steps count in neither.
fn windows(losses: &[f64]) -> (&[f64], &[f64]) {
    let size = if losses.len() == REMEMBERED { RECENT } else { (losses.len() / 4).max(1) };
    let (earlier, last) = losses.split_at(losses.len().saturating_sub(size));
    (&earlier[earlier.len().saturating_sub(size)..], last)
}

fn mean(losses: &[f64]) -> f64 {
    losses.iter().sum::<f64>() / losses.len() as f64
}

impl Weights {
    /// Of a share whose numbers are all `finite`, the `largest` of its weights given.
    pub(super) fn of(finite: bool, largest: f64) -> Self {
        match finite {
            false => Self::NotFinite,
            true if largest > LARGEST_WEIGHT => Self::TooLarge,
            true => Self::Sound,
        }
    }

    /// As a rank tells it to the others, and back.
    pub(super) fn to_byte(self) -> u8 {
        self as u8
    }

    pub(super) fn from_byte(byte: u8) -> Self {
        [Self::Sound, Self::TooLarge]
            .into_iter()
            .find(|it| it.to_byte() == byte)
            .unwrap_or(Self::NotFinite)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health(ignorance: f64) -> Health {
        Health {
            ignorance,
            sum: 0.0,
            moved: 0,
            unproven: None,
            good: None,
            bad: 0,
            last_bad: 0,
            has_moved: false,
            stuck: None,
            ruin: None,
        }
    }

    #[test]
    fn weights_are_judged_by_the_worst() {
        let check = |finite, largest, expect| assert_eq!(Weights::of(finite, largest), expect);
        check(true, 80.0, Weights::Sound);
        check(true, 1e4, Weights::TooLarge);
        check(false, 1.0, Weights::NotFinite);
        for weights in [Weights::Sound, Weights::TooLarge, Weights::NotFinite] {
            assert_eq!(Weights::from_byte(weights.to_byte()), weights);
        }
        assert!(Weights::NotFinite > Weights::TooLarge && Weights::TooLarge > Weights::Sound);
    }

    #[test]
    fn a_checkpoint_is_good_once_the_step_after_it_is() {
        let (mut health, mut position) = (health(4.0), Position::default());
        let add = |health: &mut Health, loss, position: &mut Position| {
            health.add(loss, USUAL_RATE, position)
        };
        assert_eq!(add(&mut health, 5.0, &mut position), None);
        assert_eq!(position.first_loss, Some(5.0));
        health.saved(1, None);
        assert_eq!((health.unproven, health.good), (Some(1), None));
        let below = add(&mut health, 11.0, &mut position);
        assert_eq!(below, None, "below three times that of guessing");
        assert_eq!((health.unproven, health.good), (None, Some(1)));
        health.saved(2, None);
        assert_eq!(add(&mut health, 16.0, &mut position), Some(2));
        assert_eq!(health.last_good(), Some(1));
        let judged = |health: &Health| health.judge(Weights::Sound, &position, USUAL_RATE, false);
        assert!(judged(&health).unwrap().starts_with("the loss is 16.0000"));
        health.saved(3, Some("ruined".to_owned()));
        assert_eq!(health.last_good(), Some(1));
        assert!(health.is_unmoved());
        assert_eq!(judged(&health), None, "nothing is known since");
    }

    #[test]
    fn fresh_weights_may_be_worse_than_guessing() {
        let (mut health, mut position) = (health(8.3), Position::default());
        assert_eq!(health.add(41.5, USUAL_RATE, &mut position), None);
        assert_eq!(health.judge(Weights::Sound, &position, USUAL_RATE, false), None);
        health.saved(1, None);
        assert_eq!(health.add(60.0, USUAL_RATE, &mut position), None);
        health.saved(2, None);
        assert_eq!(health.add(100.0, USUAL_RATE, &mut position), Some(2));
    }

    /// A run of these losses at one rate, on a target whose guesses have 8.3 nats.
    struct Run {
        health: Health,
        position: Position,
        rate: f64,
    }

    impl Run {
        fn at(rate: f64, losses: &[f64]) -> Self {
            let mut run = Self { health: health(8.3), position: Position::default(), rate };
            run.go_on(losses);
            run
        }

        fn go_on(&mut self, losses: &[f64]) {
            for &loss in losses {
                self.position.step += 1;
                self.health.add(loss, self.rate, &mut self.position);
            }
        }

        /// What is wrong with it, at its end or on the way.
        fn judged(&self, is_end: bool) -> Option<String> {
            self.health.judge(Weights::Sound, &self.position, self.rate, is_end)
        }

        fn fails_for(&self, reason: &str) {
            let sign = self.judged(true).unwrap_or_else(|| panic!("it is lost: {reason}"));
            assert!(sign.contains(reason), "{sign}");
        }

        fn is_merely_slow(&self) {
            assert_eq!(self.judged(true), None);
            assert!(self.health.closing_note(&self.position).is_some());
        }
    }

    /// `from` in the first step, `falling` by so large a share in each that follows.
    fn descent(from: f64, falling: f64, steps: i32) -> Vec<f64> {
        (0..steps).map(|step| from * (1.0 - falling).powi(step)).collect()
    }

    #[test]
    fn a_run_that_rose_and_stays_above_guessing_is_ruined_however_high_it_began() {
        let thrown_off = [41.0, 54.9, 47.7, 40.0, 35.0, 30.0, 27.0, 25.0, 24.0, 23.0, 23.0, 23.0];
        let run = Run::at(USUAL_RATE, &thrown_off);
        let told = "the loss of the last 3 steps is 23.0000, where guessing has 8.3000: it rose from 41.0000 to 54.9000";
        assert_eq!(run.judged(false).as_deref(), Some(told));
        let early = Run::at(USUAL_RATE, &thrown_off[..5]);
        assert_eq!(early.judged(false), None, "a bump may come down");
        early.fails_for("the last step is 35.0000, where guessing has 8.3000: it rose");
        assert_eq!(Run::at(USUAL_RATE, &thrown_off[..1]).judged(true), None, "nothing has moved");
        let bump = [41.0, 55.0, 30.0, 12.0, 9.0, 8.0, 7.0, 7.0, 6.0, 6.0, 6.0, 6.0, 6.0];
        let run = Run::at(USUAL_RATE, &bump);
        assert_eq!((run.judged(true), run.health.closing_note(&run.position)), (None, None));
    }

    #[test]
    fn a_run_that_ends_far_above_guessing_without_ever_rising_is_no_success() {
        // --lr 10 on a small target: the weights are lost in the first steps, and it never rose
        let losses = [descent(41.0, 0.1, 6), vec![23.0; 20]].concat();
        for rate in [10.0, USUAL_RATE] {
            Run::at(rate, &losses).fails_for("it stands still, and was 23.0000 before");
        }
        Run::at(10.0, &losses[..12]).fails_for("the last 3 steps is 23.0000");
        Run::at(USUAL_RATE, &losses[..12]).is_merely_slow();
        // recorded at --lr 2, where guessing had 4.16: twice that
        let recorded = [73.59, 33.99, 62.01, 73.33, 53.0, 53.24];
        Run::at(1.0, &recorded).fails_for("the last step is 53.2400");
    }

    #[test]
    fn a_short_or_slow_run_that_comes_down_gets_a_line() {
        // A run of a few steps, one at a tenth of the usual rate, and one whose schedule has come to its end.
        Run::at(USUAL_RATE, &[41.0, 42.0, 38.0, 35.0]).is_merely_slow();
        Run::at(20.0 * USUAL_RATE, &descent(41.0, 0.1, 10)).is_merely_slow();
        // recorded at --lr 0.3, as above: the rate is far too high, and the loss comes down nevertheless
        Run::at(0.15, &[73.59, 33.23, 23.29, 15.9, 15.4, 12.9]).is_merely_slow();
        Run::at(USUAL_RATE, &[41.0, 42.0, 38.0, 35.0, 33.0, 31.0, 30.0, 29.0, 28.0])
            .is_merely_slow();
        let slow = descent(41.0, 0.004, 60);
        Run::at(USUAL_RATE / 10.0, &descent(41.0, 0.004, 150)).is_merely_slow();
        Run::at(USUAL_RATE, &slow).is_merely_slow();
        let mut run = Run::at(USUAL_RATE, &descent(41.0, 0.02, 40));
        run.rate = 1e-6;
        run.go_on(&[18.0; 16]);
        run.is_merely_slow();
        // A long one has had its chance, whatever it does.
        Run::at(USUAL_RATE, &descent(41.0, 0.004, 120))
            .fails_for("120 steps with a learning rate of 6.0e-4 are enough");
    }

    #[test]
    fn a_resumed_run_is_judged_with_the_losses_before() {
        let flat = [descent(41.0, 0.1, 6), vec![23.0; 14]].concat();
        let before = Run::at(USUAL_RATE, &flat);
        let stored = serde_json::to_string(&before.position).unwrap();
        let position: Position = serde_json::from_str(&stored).unwrap();
        assert_eq!(position.recent_losses.len(), REMEMBERED);
        let mut resumed = Run { health: health(8.3), position, rate: USUAL_RATE };
        assert_eq!(resumed.judged(true), None, "nothing has moved since");
        resumed.go_on(&[23.0; 2]);
        resumed.fails_for("the last 8 steps is 23.0000");
        // what a state of an earlier release does not say is not held against it
        let mut older = Run::at(USUAL_RATE, &[23.0; 2]);
        older.position.first_loss = Some(41.0);
        older.is_merely_slow();
    }

    #[test]
    fn a_first_loss_far_above_guessing_is_explained() {
        let note = |loss| health(8.3).opening_note(loss);
        assert!(
            note(41.0)
                .unwrap()
                .starts_with("the loss of step 1, 41.00, is above that of guessing (8.30)")
        );
        assert_eq!(note(9.0), None);
    }

    #[test]
    fn a_spike_below_guessing_is_no_ruin() {
        let (mut health, mut position) = (health(11.0), Position::default());
        health.add(0.5, USUAL_RATE, &mut position);
        health.saved(1, None);
        assert_eq!(health.add(20.0, USUAL_RATE, &mut position), None);
    }

    #[test]
    fn bad_steps_are_said_ever_less_often() {
        let mut health = health(1.0);
        let said: Vec<u64> = (1..=40).filter(|&step| health.add_bad(step)).collect();
        assert_eq!(said, [1, 2, 3, 4, 8, 16, 32]);
        assert_eq!((health.bad, health.last_bad), (40, 40));
    }
}
