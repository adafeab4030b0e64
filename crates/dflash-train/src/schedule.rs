//! Learning-rate schedules: a multiplier of the peak rate for each step.

use dflash_settings::{OptimizerSettings, SchedulerType};
use serde::Serialize;

/// Shape of the schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Half a cosine to the minimum.
    Cosine,
    /// A straight line to the minimum.
    Linear,
    /// Warm-up, stable, decay: at the peak until the last `decay_ratio` of all steps, then
    /// `1 - sqrt` to the minimum.
    Wsd {
        /// Share of all steps that decay.
        decay_ratio: f64,
    },
    /// At the peak throughout.
    None,
}

/// How long the warm-up is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Warmup {
    /// Steps.
    Steps(u64),
    /// Share of all steps.
    Ratio(f64),
}

impl Warmup {
    fn steps(self, total: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Ratio(ratio) => (ratio * total as f64) as u64,
        }
    }
}

/// A schedule over a known number of steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub kind: ScheduleKind,
    /// Length of the warm-up.
    pub warmup: Warmup,
    /// Multiplier at the end, as a share of the peak.
    pub minimum: f64,
}

impl Schedule {
    /// Multiplier at `step` of `total`: 0 at step 0 of a warm-up, 1 at its end, the minimum at
    /// `total`. For cosine and linear it is the one of Transformers' schedules.
    pub fn multiplier(&self, step: u64, total: u64) -> f64 {
        let warmup = self.warmup.steps(total);
        if step < warmup {
            return step as f64 / warmup as f64;
        }
        let span = total.saturating_sub(warmup).max(1) as f64;
        let progress = ((step - warmup) as f64 / span).min(1.0);
        let shape = match self.kind {
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            ScheduleKind::Linear => 1.0 - progress,
            ScheduleKind::Wsd { decay_ratio } => {
                // a warm-up that reaches into the decay leaves it what is left
                let length = (decay_ratio * total as f64).clamp(1.0, span);
                decay(step, total, length)
            }
            ScheduleKind::None => 1.0,
        };
        self.minimum + (1.0 - self.minimum) * shape
    }

    /// Whether the warm-up of a run of `total` steps ends before the run does.
    pub fn reaches_peak(&self, total: u64) -> bool {
        self.warmup.steps(total + 1) <= total
    }

    /// Multiplier of the `step`-th optimizer step (from 0) of `total`. The schedule's own ends,
    /// where the rate is 0, fall before the first and behind the last step: no step is wasted.
    pub fn of_step(&self, step: u64, total: u64) -> f64 {
        self.multiplier(step + 1, total + 1)
    }
}

impl From<&OptimizerSettings> for Schedule {
    fn from(settings: &OptimizerSettings) -> Self {
        let kind = match settings.scheduler_type {
            SchedulerType::Cosine => ScheduleKind::Cosine,
            SchedulerType::Linear => ScheduleKind::Linear,
            SchedulerType::Wsd => ScheduleKind::Wsd { decay_ratio: settings.decay_ratio },
            SchedulerType::None => ScheduleKind::None,
        };
        let warmup =
            settings.warmup_steps.map_or(Warmup::Ratio(settings.warmup_ratio), Warmup::Steps);
        Self { kind, warmup, minimum: settings.min_lr_ratio }
    }
}

/// `1 - sqrt` over the last `length` steps.
fn decay(step: u64, total: u64, length: f64) -> f64 {
    let begun = step as f64 - (total as f64 - length);
    if begun <= 0.0 { 1.0 } else { 1.0 - (begun / length).min(1.0).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, warmup: Warmup::Steps(10), minimum: 0.0 }
    }

    #[test]
    fn every_shape_warms_up_and_only_none_stays() {
        let kinds = [
            ScheduleKind::Cosine,
            ScheduleKind::Linear,
            ScheduleKind::Wsd { decay_ratio: 0.2 },
            ScheduleKind::None,
        ];
        for kind in kinds {
            let schedule = schedule(kind);
            assert_eq!(schedule.multiplier(5, 100), 0.5, "{kind:?}");
            assert_eq!(schedule.multiplier(10, 100), 1.0, "{kind:?}");
            let last = schedule.multiplier(100, 100);
            assert_eq!(last < 1e-12, kind != ScheduleKind::None, "{kind:?}");
        }
    }

    #[test]
    fn wsd_is_stable_until_its_decay() {
        let schedule = schedule(ScheduleKind::Wsd { decay_ratio: 0.2 });
        assert_eq!(schedule.multiplier(80, 100), 1.0);
        assert!((schedule.multiplier(85, 100) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn wsd_decays_in_what_a_long_warm_up_leaves() {
        let warmup = Warmup::Steps(60);
        let schedule = Schedule { warmup, ..schedule(ScheduleKind::Wsd { decay_ratio: 0.8 }) };
        let rates: Vec<f64> = (55..=100).map(|step| schedule.multiplier(step, 100)).collect();
        assert_eq!((rates[5], rates[45]), (1.0, 0.0));
        assert!(rates[..6].is_sorted() && rates[5..].is_sorted_by(|a, b| a >= b), "{rates:?}");
        assert!(schedule.reaches_peak(60) && !schedule.reaches_peak(59));
    }

    #[test]
    fn the_minimum_is_a_floor() {
        let schedule = Schedule { minimum: 0.1, ..schedule(ScheduleKind::Cosine) };
        assert!((schedule.multiplier(100, 100) - 0.1).abs() < 1e-12);
        assert_eq!(schedule.multiplier(10, 100), 1.0);
    }

    #[test]
    fn no_step_has_rate_zero() {
        let schedule = Schedule { warmup: Warmup::Ratio(0.04), ..schedule(ScheduleKind::Cosine) };
        assert!((0..1000).all(|step| schedule.of_step(step, 1000) > 0.0));
    }
}
