//! Handles non-finite steps and ruined states.

use std::path::Path;

use dflash_run::{Checkpoint, RunDir};

use super::health::{USUAL_RATE, Weights};
use super::worker::Worker;
use crate::Error;
use crate::metrics::Meter;
use crate::readback::StepOutcome;
use crate::trainer::Effect;

/// Default Muon learning rate.
const USUAL_MUON_RATE: f64 = 10.0 * USUAL_RATE;

impl Worker<'_, '_> {
    /// Updates the run's health with the outcome of `step`.
    pub(super) fn watch(&mut self, step: u64, outcome: &StepOutcome, meter: &Meter) {
        match outcome.effect {
            Effect::Moved => {
                let epsilon = self.trainer.objective.denominator.epsilon();
                let loss = outcome.statistics.report(epsilon).loss;
                let unproven = self.health.unproven.is_some();
                if step == 1
                    && let Some(note) = self.health.opening_note(loss)
                {
                    meter.say(&note);
                }
                let rate = self.rate(step - 1);
                match self.health.add(loss, rate, &mut self.position) {
                    Some(saved) => self.condemn(saved, loss, meter),
                    None if unproven => self.prune(meter, self.health.good),
                    None => {}
                }
            }
            Effect::NotFinite if self.health.add_bad(step) => {
                let (bad, norm) = (self.position.bad_steps, outcome.gradient_norm);
                meter.say(&format!(
                    "step {step}: loss or gradient is not finite (gradient norm {norm}), and the weights are not changed; it is the {} such step",
                    ordinal(bad)
                ));
            }
            Effect::NotFinite | Effect::Empty | Effect::Void => {}
        }
    }

    /// Bars the checkpoint of step `saved`, after which the loss exploded, from being resumed.
    fn condemn(&self, saved: u64, loss: f64, meter: &Meter) {
        if self.save_path.is_none() {
            return;
        }
        let dir = &self.prepared.config.settings.save_path;
        meter.say(&format!(
            "--resume will not take step {saved}: the loss after it is {loss:.4}, far above that of guessing"
        ));
        if let Err(error) = Checkpoint::at(dir, saved).mark_diverged() {
            meter.say(&format!("but it could not be marked: {error}"));
        }
    }

    /// The worst condition of the weights over all ranks.
    pub(super) fn weights(&self) -> Result<Weights, Error> {
        let (finite, largest) = self.trainer.master_weights.soundness();
        let own = Weights::of(finite, largest);
        let all = self.communicator.all_gather_bytes(&[own.to_byte()])?;
        let all = all.iter().filter_map(|byte| byte.first());
        Ok(all.map(|&byte| Weights::from_byte(byte)).max().unwrap_or(own))
    }

    /// The defect of the present state, if any.
    pub(super) fn ruin(&mut self, weights: Weights) -> Option<String> {
        let step = self.position.step;
        let (rate, is_end) = (self.rate(step.saturating_sub(1)), step == self.total);
        let judged = self.health.judge(weights, &self.position, rate, is_end);
        let count = self.position.bad_in_a_row;
        let is_stuck = count >= self.prepared.config.settings.optimizer.max_bad_steps;
        if judged.is_none() && is_stuck {
            self.health.stuck = Some(step);
        }
        judged.or_else(|| is_stuck.then(|| format!("{count} consecutive steps were not finite")))
    }

    /// The step of the last usable checkpoint: of this process, or the one it resumed.
    pub(super) fn kept(&self) -> Option<u64> {
        let began_with = self.prepared.resume.as_ref().map(|checkpoint| checkpoint.step);
        self.health.last_good().or(began_with)
    }

    /// Description of where the present weights come from if no step has changed them.
    pub(super) fn origin(&self) -> String {
        self.kept().map_or_else(|| "the start".to_owned(), |step| format!("step {step}"))
    }

    /// Reports how many steps of this process were not finite.
    pub(super) fn sum_up_bad_steps(&self, meter: &Meter) {
        let (bad, last) = (self.health.bad, self.health.last_bad);
        let steps = self.position.step - self.begun_at;
        if bad > 0 {
            meter.say(&format!(
                "{bad} of {steps} steps were not finite and changed nothing (last: step {last})"
            ));
        }
    }

    /// Advice for a diverged run: flags to add to the command.
    pub(super) fn remedy(&self) -> String {
        let settings = &self.prepared.config.settings;
        let run = RunDir::at(&settings.save_path);
        let there = run.checkpoints().unwrap_or_default();
        let lower = self.lower_rates();
        let rates = flags(&lower);
        let allowed = settings.allow_changed.as_deref().unwrap_or_default();
        let mut names = allowed.to_vec();
        let added = lower.iter().map(|(flag, _)| (*flag).to_owned());
        names.extend(added.filter(|flag| !allowed.contains(flag)));
        let go_on = |step: u64| {
            let names = names.join(",");
            format!(
                "to go on from it with a lower learning rate, add to the command: \
                 --resume={step} {rates} --allow-changed {names}"
            )
        };
        if let Some(good) = self.better_start(&there) {
            let (path, go_on) = (good.dir.display(), go_on(good.step));
            return format!("the last good checkpoint is {path}; {go_on}");
        }
        if let Some(step) = self.health.stuck {
            let (path, go_on) = (Checkpoint::at(Path::new(""), step).dir, go_on(step));
            let path = path.display();
            return format!(
                "no checkpoint was saved before; the state until then is in {path}; {go_on}"
            );
        }
        if there.is_empty() {
            return format!(
                "there is no good checkpoint; to start again with a lower learning rate, add to the \
                 command: {rates}"
            );
        }
        let path = settings.save_path.display();
        format!(
            "there is no good checkpoint; to start again with a lower learning rate, add to the \
             command: --resume=auto {rates} --save-path {path}-again"
        )
    }

    /// The checkpoint to resume from: the last good one, or the one before if this process made no
    /// progress from it.
    fn better_start(&self, there: &[Checkpoint]) -> Option<Checkpoint> {
        let last = self.health.last_good();
        let before = |step: u64| {
            there.iter().rfind(|other| other.step < step && !other.is_diverged()).cloned()
        };
        let known = last.map(|step| Checkpoint::at(&self.prepared.config.settings.save_path, step));
        let begun_at = self.prepared.resume.as_ref().map(|checkpoint| checkpoint.step);
        let earlier =
            begun_at.filter(|_| !self.health.has_moved || known.is_none()).and_then(before);
        earlier.or(known)
    }

    /// Lower learning rates to try, with their flags.
    fn lower_rates(&self) -> Vec<(&'static str, f64)> {
        let settings = &self.prepared.config.settings.optimizer;
        let muon = settings.muon_lr.map(|rate| ("muon-lr", lower(rate, USUAL_MUON_RATE)));
        [("lr", lower(settings.lr, USUAL_RATE))].into_iter().chain(muon).collect()
    }
}

fn flags(rates: &[(&str, f64)]) -> String {
    let flags: Vec<String> =
        rates.iter().map(|(flag, rate)| format!("--{flag} {rate:.1e}")).collect();
    flags.join(" ")
}

/// The usual rate if `rate` exceeds it, otherwise a tenth of `rate`.
fn lower(rate: f64, usual: f64) -> f64 {
    if rate > usual { usual } else { rate / 10.0 }
}

/// 1st, 2nd, 3rd, 4th.
fn ordinal(count: u64) -> String {
    let suffix = match (count % 10, count % 100) {
        (1, tens) if tens != 11 => "st",
        (2, tens) if tens != 12 => "nd",
        (3, tens) if tens != 13 => "rd",
        _ => "th",
    };
    format!("{count}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_such_that_they_can_be_typed() {
        assert_eq!(
            flags(&[("lr", 6e-4 / 10.0), ("muon-lr", 0.02)]),
            "--lr 6.0e-5 --muon-lr 2.0e-2"
        );
        assert_eq!(
            [1, 2, 3, 4, 11, 12, 23, 111].map(ordinal),
            ["1st", "2nd", "3rd", "4th", "11th", "12th", "23rd", "111th"]
        );
    }
}
