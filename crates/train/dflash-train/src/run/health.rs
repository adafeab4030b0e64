//! Whether what a run has trained is worth keeping.
//!
//! A state is ruined when a number in it is not finite, when a weight is far beyond what any draft's
//! weights are, or when the loss is far above that of guessing and above that of the run's beginning.
//! The last shows only in the step after: a checkpoint is held to be good once the step after it was.
//!
//! A run that rose above its beginning and has not come down to what guesses have is ruined too, however
//! high it began: fresh weights start far above guesses, and the first steps bring them down.

use std::collections::VecDeque;

use dflash_draft::loss_of_guesses;
use dflash_run::Position;

use crate::prepared::Prepared;

/// Weights of drafts, norms included, stay below a hundred.
const LARGEST_WEIGHT: f64 = 1e3;

/// A loss of this many times that of guesses is no fluctuation.
const ABOVE_GUESSES: f64 = 3.0;

/// The loss of fresh weights is often above that (41 with the 4096 tokens of a small target, where
/// guesses have 8): a run that has gone wrong is above its own beginning too.
const ABOVE_FIRST: f64 = 1.5;

/// Steps over which a loss that has not come down is looked at: fewer say nothing, and a checkpoint saved in
/// the first steps is not judged so.
const RECENT: usize = 8;

/// A run that rose so far above its first loss was thrown off, not slow to begin: the losses of fresh weights
/// differ by a few percent from row to row.
const THROWN_OFF: f64 = 1.2;

/// Times the loss of guesses that the recent ones of a run that was thrown off may have.
const STILL_ABOVE: f64 = 1.5;

/// What the losses say of the run so far, the same on all ranks.
pub(super) struct Health {
    /// The loss of a draft that gives every token the same probability, nats, by the terms of the objective
    /// and of the head.
    ignorance: f64,
    /// The last losses, up to [`RECENT`] of them.
    recent: VecDeque<f64>,
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
            recent: VecDeque::new(),
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

    /// Adds the loss of a step that moved something; the checkpoint before it that it shows to be
    /// ruined, if it does.
    pub(super) fn add(&mut self, loss: f64, position: &mut Position) -> Option<u64> {
        position.first_loss.get_or_insert(loss);
        let highest = position.highest_loss.get_or_insert(loss);
        *highest = highest.max(loss);
        self.recent.push_back(loss);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
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

    /// What is wrong with a state of these weights, if something is.
    pub(super) fn judge(&self, weights: Weights, position: &Position) -> Option<String> {
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
            Weights::Sound if self.moved > 0 && self.is_thrown_off(position) => {
                let (recent, ignorance) = (self.recent_loss(), self.ignorance);
                let highest = position.highest_loss.unwrap_or(f64::NAN);
                Some(format!(
                    "the loss of the last {RECENT} steps is {recent:.4}, which rose to {highest:.4} and is {ignorance:.4} for guessing"
                ))
            }
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

    /// What to say at the end of a run that was not thrown off and has still not come down to guesses.
    pub(super) fn closing_note(&self) -> Option<String> {
        let (recent, ignorance) = (self.recent_loss(), self.ignorance);
        (self.has_moved && recent > ignorance).then(|| {
            format!(
                "the loss, {recent:.2} at the end, is above that of guessing ({ignorance:.2}): the draft \
                 proposes no better than chance; train longer, or at another --lr"
            )
        })
    }

    /// The mean of the last losses.
    fn recent_loss(&self) -> f64 {
        self.recent.iter().sum::<f64>() / self.recent.len() as f64
    }

    fn is_thrown_off(&self, position: &Position) -> bool {
        let highest = position.highest_loss.unwrap_or_default();
        let rose = highest > THROWN_OFF * position.first_loss.unwrap_or(f64::INFINITY);
        rose && self.recent.len() == RECENT && self.recent_loss() > STILL_ABOVE * self.ignorance
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
        !loss.is_finite() || loss > (ABOVE_GUESSES * self.ignorance).max(ABOVE_FIRST * first)
    }
}

impl Weights {
    /// Of a share whose numbers are all `finite`, the `largest` of its weights given.
    pub(super) fn of((finite, largest): (bool, f64)) -> Self {
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
            recent: VecDeque::new(),
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
        let check = |finite, largest, expect| assert_eq!(Weights::of((finite, largest)), expect);
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
        assert_eq!(health.add(5.0, &mut position), None);
        assert_eq!(position.first_loss, Some(5.0));
        health.saved(1, None);
        assert_eq!((health.unproven, health.good), (Some(1), None));
        assert_eq!(health.add(11.0, &mut position), None, "below three times that of guesses");
        assert_eq!((health.unproven, health.good), (None, Some(1)));
        health.saved(2, None);
        assert_eq!(health.add(16.0, &mut position), Some(2));
        assert_eq!(health.last_good(), Some(1));
        assert!(
            health.judge(Weights::Sound, &position).unwrap().starts_with("the loss is 16.0000")
        );
        health.saved(3, Some("ruined".to_owned()));
        assert_eq!(health.last_good(), Some(1));
        assert!(health.is_unmoved());
        assert_eq!(health.judge(Weights::Sound, &position), None, "nothing is known since");
    }

    #[test]
    fn fresh_weights_may_be_worse_than_guesses() {
        let (mut health, mut position) = (health(8.3), Position::default());
        assert_eq!(health.add(41.5, &mut position), None);
        assert_eq!(health.judge(Weights::Sound, &position), None);
        health.saved(1, None);
        assert_eq!(health.add(60.0, &mut position), None);
        health.saved(2, None);
        assert_eq!(health.add(100.0, &mut position), Some(2));
    }

    #[test]
    fn a_run_that_rose_and_stays_above_guesses_is_ruined_however_high_it_began() {
        let judged = |losses: &[f64]| {
            let (mut health, mut position) = (health(8.3), Position::default());
            losses.iter().for_each(|&loss| _ = health.add(loss, &mut position));
            (health.judge(Weights::Sound, &position), health.closing_note().is_some())
        };
        let thrown_off = [41.0, 54.9, 47.7, 40.0, 35.0, 30.0, 27.0, 25.0, 24.0, 23.0, 23.0, 23.0];
        let (sign, _) = judged(&thrown_off);
        let told = "the loss of the last 8 steps is 26.2500, which rose to 54.9000 and is 8.3000 for guesses";
        assert_eq!(sign.as_deref(), Some(told));
        assert_eq!(judged(&thrown_off[..7]).0, None, "too early to tell");
        // It only goes down: a short run, or one whose rate is low.
        let slow = [41.0, 42.0, 38.0, 35.0, 33.0, 31.0, 30.0, 29.0, 28.0, 27.0, 26.0];
        assert_eq!(judged(&slow), (None, true));
        // It rose, and has come down.
        let bump = [41.0, 55.0, 30.0, 12.0, 9.0, 8.0, 7.0, 7.0, 6.0, 6.0, 6.0, 6.0, 6.0];
        assert_eq!(judged(&bump), (None, false));
    }

    #[test]
    fn a_first_loss_far_above_guesses_is_explained() {
        let note = |loss| health(8.3).opening_note(loss);
        assert!(
            note(41.0)
                .unwrap()
                .starts_with("the loss of step 1, 41.00, is above that of guessing (8.30)")
        );
        assert_eq!(note(9.0), None);
    }

    #[test]
    fn a_spike_below_guesses_is_no_ruin() {
        let (mut health, mut position) = (health(11.0), Position::default());
        health.add(0.5, &mut position);
        health.saved(1, None);
        assert_eq!(health.add(20.0, &mut position), None);
    }

    #[test]
    fn bad_steps_are_said_ever_less_often() {
        let mut health = health(1.0);
        let said: Vec<u64> = (1..=40).filter(|&step| health.add_bad(step)).collect();
        assert_eq!(said, [1, 2, 3, 4, 8, 16, 32]);
        assert_eq!((health.bad, health.last_bad), (40, 40));
    }
}
