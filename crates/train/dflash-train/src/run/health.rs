//! Judges whether a run's state is worth keeping.
//!
//! A state is ruined if a number in it is not finite, if a weight is far larger than any draft's
//! weights, or if the loss is far above uniform guessing and above the run's initial loss. The last
//! shows only in the following step, so a checkpoint counts as good once the next step was good.
//!
//! A run is also ruined if its loss has not come down to guessing after a fair chance, however high
//! it started ([`Health::lost_chance`]).

use dflash_draft::loss_of_guesses;
use dflash_run::Position;

use crate::prepared::Prepared;

/// Weights of drafts, including norms, stay below a hundred.
const LARGEST_WEIGHT: f64 = 1e3;

/// Multiple of the guessing loss that is not a fluctuation.
const ABOVE_GUESSING: f64 = 3.0;

/// Multiple of the first loss that a ruined run must exceed too. Fresh weights often start far
/// above guessing: 41 with the 4,096 tokens of a small target, where guessing gives 8.
const ABOVE_FIRST: f64 = 1.5;

/// Multiple of the guessing loss above which a run that had its chance has failed.
const STILL_ABOVE: f64 = 1.5;

/// Number of steps whose mean loss is compared with that of as many before; such means fluctuate by
/// about one percent.
const RECENT: usize = 8;

/// Number of losses remembered.
const REMEMBERED: usize = 2 * RECENT;

/// A rise above this multiple of the first loss means that the weights were thrown off, rather than
/// a slow start: the initial loss varies by only a few percent from row to row.
const THROWN_OFF: f64 = 1.2;

/// Default of --lr, the paper's learning rate, at which fresh weights reach the guessing loss
/// within some dozens of steps. A higher one is the first suspect.
pub(super) const USUAL_RATE: f64 = 6e-4;

/// Steps after which every healthy run is below guessing, at the usual learning rate on average;
/// some dozens suffice.
const CHANCE: u32 = 100;

/// Sum of the learning rates of those steps, which bounds how far an optimizer moves a weight:
/// three times the standard deviation of fresh weights.
const FAR: f64 = CHANCE as f64 * USUAL_RATE;

/// A mean loss above this share of the previous one counts as no progress. A healthy loss falls by
/// several percent in [`RECENT`] steps even at a tenth of the usual learning rate.
const STANDS_STILL: f64 = 0.99;

/// The state of the run judged by its losses; the same on all ranks.
pub(super) struct Health {
    /// Loss in nats of a draft that gives every token the same probability, for the objective's and
    /// the head's terms.
    ignorance: f64,
    /// Sum of the losses of the effective steps since the last checkpoint; `moved` is their number.
    sum: f64,
    moved: u64,
    /// The last checkpoint, until the next step shows that it is good.
    pub(super) unproven: Option<u64>,
    /// The last checkpoint known to be good.
    pub(super) good: Option<u64>,
    /// Number of non-finite steps of this process; `last_bad` is the last one.
    pub(super) bad: u64,
    pub(super) last_bad: u64,
    /// Whether any step of this process changed the weights.
    pub(super) has_moved: bool,
    /// A checkpoint with sound weights from which the run made no progress.
    pub(super) stuck: Option<u64>,
    /// The defect of the last state that was due to be saved.
    pub(super) ruin: Option<String>,
}

/// Condition of the weights; ordered by severity, so that the maximum over ranks decides.
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

    /// Adds the loss of a step that changed the weights at learning rate `rate`. Returns the
    /// preceding checkpoint if this loss shows it to be ruined.
    pub(super) fn add(&mut self, loss: f64, rate: f64, position: &mut Position) -> Option<u64> {
        position.first_loss.get_or_insert(loss);
        let highest = position.highest_loss.get_or_insert(loss);
        *highest = highest.max(loss);
        position.lr_sum += rate;
        // A state file cannot represent a non-finite number.
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

    /// Counts a non-finite step; returns whether to report it: the first few always, later ones
    /// ever more rarely.
    pub(super) fn add_bad(&mut self, step: u64) -> bool {
        self.bad += 1;
        self.last_bad = step;
        self.bad <= 3 || self.bad.is_power_of_two()
    }

    /// Whether no step changed the weights since the last checkpoint or this process's start.
    pub(super) fn is_unmoved(&self) -> bool {
        self.moved == 0
    }

    /// The defect of a state with these weights, if any. At the run's end fewer losses suffice.
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

    /// A note about a first `loss` far above guessing.
    pub(super) fn opening_note(&self, loss: f64) -> Option<String> {
        let ignorance = self.ignorance;
        (loss > STILL_ABOVE * ignorance).then(|| {
            format!(
                "the loss of step 1, {loss:.2}, is above that of guessing ({ignorance:.2}), as usual: initial weights are confident and wrong, which some dozens of steps correct"
            )
        })
    }

    /// A note at the end of a run that is not ruined but still above guessing.
    pub(super) fn closing_note(&self, position: &Position) -> Option<String> {
        let (recent, ignorance) = (mean(windows(&position.recent_losses).1), self.ignorance);
        (self.has_moved && recent > ignorance).then(|| {
            format!(
                "the loss, {recent:.2} at the end, is above that of guessing ({ignorance:.2}): the draft \
                 proposes no better than chance; train longer, or at another --lr"
            )
        })
    }

    /// Describes how a run has missed its chance, if it has: a loss above [`STILL_ABOVE`] times
    /// guessing is a failure, whatever the first loss was. Fresh weights may start at five times
    /// guessing, so a healthy run is above it too until it has had its chance, which is over
    ///
    /// - if the loss rose above [`THROWN_OFF`] times the first: too high a learning rate threw the
    ///   weights off;
    /// - after [`CHANCE`] steps whose learning rates sum to [`FAR`], whatever the loss does;
    /// - if the loss makes no progress ([`STANDS_STILL`]) at half the usual learning rate or more.
    ///   At a lower one, as at the end of a schedule, a healthy loss does not fall either. With
    ///   fewer than [`REMEMBERED`] losses, which say less, each step must instead, on average, have
    ///   moved as far as a healthy run does in total ([`FAR`]).
    ///
    /// Otherwise the run is short or slow and gets [`Self::closing_note`]. With fewer than
    /// [`RECENT`] losses only the run's end is judged, since the loss may still be falling.
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

    /// Records a checkpoint of `step`, with its defect if it is ruined.
    pub(super) fn saved(&mut self, step: u64, ruin: Option<String>) {
        (self.sum, self.moved) = (0.0, 0);
        if ruin.is_none() {
            self.good = self.unproven.take().or(self.good);
            self.unproven = Some(step);
        }
        self.ruin = ruin;
    }

    /// The last checkpoint that is good as far as is known.
    pub(super) fn last_good(&self) -> Option<u64> {
        self.unproven.or(self.good)
    }

    fn is_exploded(&self, loss: f64, position: &Position) -> bool {
        let first = position.first_loss.unwrap_or_default();
        !loss.is_finite() || loss > (ABOVE_GUESSING * self.ignorance).max(ABOVE_FIRST * first)
    }
}

/// The latest losses, and as many before them: [`RECENT`] each, or a quarter of the history if that
/// is shorter than [`REMEMBERED`], so that neither includes the high losses of the first steps.
fn windows(losses: &[f64]) -> (&[f64], &[f64]) {
    let size = if losses.len() == REMEMBERED { RECENT } else { (losses.len() / 4).max(1) };
    let (earlier, last) = losses.split_at(losses.len().saturating_sub(size));
    (&earlier[earlier.len().saturating_sub(size)..], last)
}

fn mean(losses: &[f64]) -> f64 {
    losses.iter().sum::<f64>() / losses.len() as f64
}

impl Weights {
    /// Condition of a share, given whether all its numbers are finite, and its largest weight.
    pub(super) fn of(finite: bool, largest: f64) -> Self {
        match finite {
            false => Self::NotFinite,
            true if largest > LARGEST_WEIGHT => Self::TooLarge,
            true => Self::Sound,
        }
    }

    /// Encodes it for exchange between ranks.
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

    /// A run with these losses at one learning rate, on a target whose guessing loss is 8.3 nats.
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

        /// Its defect, at the end or midway.
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

    /// Losses that start at `from` and fall by the share `falling` in each step.
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
        // --lr 10 on a small target: the weights are lost at once, and the loss never rose
        let losses = [descent(41.0, 0.1, 6), vec![23.0; 20]].concat();
        for rate in [10.0, USUAL_RATE] {
            Run::at(rate, &losses).fails_for("it stands still, and was 23.0000 before");
        }
        Run::at(10.0, &losses[..12]).fails_for("the last 3 steps is 23.0000");
        Run::at(USUAL_RATE, &losses[..12]).is_merely_slow();
        // recorded at --lr 2, with a guessing loss of 4.16
        let recorded = [73.59, 33.99, 62.01, 73.33, 53.0, 53.24];
        Run::at(1.0, &recorded).fails_for("the last step is 53.2400");
    }

    #[test]
    fn a_short_or_slow_run_that_comes_down_gets_a_line() {
        // A run of a few steps, one at a tenth of the usual rate, and one at its schedule's end.
        Run::at(USUAL_RATE, &[41.0, 42.0, 38.0, 35.0]).is_merely_slow();
        Run::at(20.0 * USUAL_RATE, &descent(41.0, 0.1, 10)).is_merely_slow();
        // recorded at --lr 0.3, as above: far too high, and yet the loss comes down
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
        // A long run has had its chance, whatever it does.
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
        // a state of an earlier release is not judged by what it does not record
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
