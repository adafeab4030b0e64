//! Learning-rate schedules: the factor by which the peak rate is multiplied in each step.

use dflash_run::SchedulePosition;
use dflash_settings::{OptimizerSettings, SchedulerType, Warmup};

/// A schedule over a known number of steps.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Shape after the warm-up; wsd's decay follows `1 - sqrt`.
    pub kind: SchedulerType,
    /// Length of the warm-up.
    pub warmup: Warmup,
    /// Share of all steps used for the decay, for wsd.
    pub decay_ratio: f64,
    /// Factor at the end.
    pub minimum: f64,
}

impl Schedule {
    /// Factor at `step` of `total`: 0 at the start of a warm-up, 1 at its end, the minimum at
    /// `total`. Cosine and linear match Transformers' schedules.
    pub fn multiplier(&self, step: u64, total: u64) -> f64 {
        self.at(step as f64, total)
    }

    /// The same for a fractional step.
    fn at(&self, step: f64, total: u64) -> f64 {
        let warmup = self.warmup.steps(total);
        if step < warmup as f64 {
            return step / warmup as f64;
        }
        let span = total.saturating_sub(warmup).max(1) as f64;
        let progress = ((step - warmup as f64) / span).min(1.0);
        let shape = match self.kind {
            SchedulerType::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            SchedulerType::Linear => 1.0 - progress,
            SchedulerType::Wsd => {
                // a long warm-up shortens the decay
                let length = (self.decay_ratio * total as f64).clamp(1.0, span);
                decay(step, total, length)
            }
            SchedulerType::None => 1.0,
        };
        self.minimum + (1.0 - self.minimum) * shape
    }

    /// Whether the warm-up of a run of `total` steps ends before the run does.
    pub fn reaches_peak(&self, total: u64) -> bool {
        self.warmup.steps(total + 1) <= total
    }

    /// Factor of the `step`-th optimizer step (from 0) of `total`. The schedule's ends, where the
    /// rate may be 0, lie before the first and after the last step, so no step is wasted.
    pub fn of_step(&self, step: u64, total: u64) -> f64 {
        self.multiplier(step + 1, total + 1)
    }

    /// The same for a run whose length may have changed.
    pub(crate) fn of_stretched(&self, step: u64, position: &SchedulePosition) -> f64 {
        self.at(reached(position, step + 1), position.planned + 1)
    }
}

/// The schedule of a fresh run of `total` steps.
pub(crate) fn planned(total: u64) -> SchedulePosition {
    SchedulePosition { planned: total, total, since: 0, at: 0.0 }
}

/// The schedule of a run that has taken `step` steps and now ends at `total`. The rest of the
/// schedule is stretched or compressed over the remaining steps, so that the rate continues from
/// its present value and ends where it was planned to.
pub(crate) fn stretched(position: SchedulePosition, step: u64, total: u64) -> SchedulePosition {
    if position.total == total {
        return position;
    }
    SchedulePosition { total, since: step, at: reached(&position, step), ..position }
}

/// The schedule's progress at `step`, in originally planned steps: linear from `since`, so that the
/// schedule's end follows the last step.
fn reached(position: &SchedulePosition, step: u64) -> f64 {
    let SchedulePosition { planned, total, since, at } = *position;
    let left = (total + 1).saturating_sub(since).max(1) as f64;
    at + step.saturating_sub(since) as f64 * ((planned as f64 + 1.0 - at) / left)
}

impl From<&OptimizerSettings> for Schedule {
    fn from(settings: &OptimizerSettings) -> Self {
        let OptimizerSettings { scheduler_type: kind, warmup, decay_ratio, min_lr_ratio, .. } =
            *settings;
        Self { kind, warmup, decay_ratio, minimum: min_lr_ratio }
    }
}

/// `1 - sqrt` over the last `length` steps.
fn decay(step: f64, total: u64, length: f64) -> f64 {
    let begun = step - (total as f64 - length);
    if begun <= 0.0 { 1.0 } else { 1.0 - (begun / length).min(1.0).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: SchedulerType) -> Schedule {
        Schedule { kind, warmup: Warmup::Steps(10), decay_ratio: 0.2, minimum: 0.0 }
    }

    #[test]
    fn every_shape_warms_up_and_only_none_stays() {
        use SchedulerType::{Cosine, Linear, None, Wsd};
        for kind in [Cosine, Linear, Wsd, None] {
            let schedule = schedule(kind);
            assert_eq!(schedule.multiplier(5, 100), 0.5, "{kind:?}");
            assert_eq!(schedule.multiplier(10, 100), 1.0, "{kind:?}");
            let last = schedule.multiplier(100, 100);
            assert_eq!(last < 1e-12, kind != None, "{kind:?}");
        }
    }

    #[test]
    fn wsd_is_stable_until_its_decay() {
        let schedule = schedule(SchedulerType::Wsd);
        assert_eq!(schedule.multiplier(80, 100), 1.0);
        assert!((schedule.multiplier(85, 100) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn wsd_decays_in_what_a_long_warm_up_leaves() {
        let warmup = Warmup::Steps(60);
        let schedule = Schedule { warmup, decay_ratio: 0.8, ..schedule(SchedulerType::Wsd) };
        let rates: Vec<f64> = (55..=100).map(|step| schedule.multiplier(step, 100)).collect();
        assert_eq!((rates[5], rates[45]), (1.0, 0.0));
        assert!(rates[..6].is_sorted() && rates[5..].is_sorted_by(|a, b| a >= b), "{rates:?}");
        assert!(schedule.reaches_peak(60) && !schedule.reaches_peak(59));
    }

    #[test]
    fn the_minimum_is_a_floor() {
        let schedule = Schedule { minimum: 0.1, ..schedule(SchedulerType::Cosine) };
        assert!((schedule.multiplier(100, 100) - 0.1).abs() < 1e-12);
        assert_eq!(schedule.multiplier(10, 100), 1.0);
    }

    #[test]
    fn a_run_whose_length_stays_follows_its_schedule_to_the_bit() {
        use SchedulerType::{Cosine, Linear, None, Wsd};
        for kind in [Cosine, Linear, Wsd, None] {
            let (schedule, whole) = (schedule(kind), planned(97));
            assert_eq!(stretched(whole, 40, 97), whole);
            for step in 0..97 {
                assert_eq!(schedule.of_stretched(step, &whole), schedule.of_step(step, 97));
            }
        }
    }

    /// The largest change between two steps of a run whose length changes twice.
    fn largest_jump(kind: SchedulerType, [first, second]: [(u64, u64); 2]) -> f64 {
        let schedule = schedule(kind);
        let (once, last) = (stretched(planned(100), first.0, first.1), second.1);
        let twice = stretched(once, second.0, last);
        let rates: Vec<f64> = (0..last)
            .map(|step| match step {
                step if step < first.0 => schedule.of_step(step, 100),
                step if step < second.0 => schedule.of_stretched(step, &once),
                step => schedule.of_stretched(step, &twice),
            })
            .collect();
        assert!(kind == SchedulerType::None || rates[last as usize - 1] < 0.3, "{kind:?}");
        // the warm-up ends after ten steps; from then on the rate never rises
        assert!(rates[10..].is_sorted_by(|a, b| a >= b), "{kind:?} {rates:?}");
        rates.windows(2).map(|pair| (pair[1] - pair[0]).abs()).skip(10).fold(0.0, f64::max)
    }

    #[test]
    fn a_run_whose_length_changes_goes_on_from_its_rate() {
        use SchedulerType::{Cosine, Linear, None, Wsd};
        for kind in [Cosine, Linear, None] {
            assert!(largest_jump(kind, [(50, 200), (120, 600)]) < 0.03, "{kind:?}");
            assert!(largest_jump(kind, [(50, 90), (60, 80)]) < 0.06, "{kind:?}");
            assert!(largest_jump(kind, [(99, 300), (300, 301)]) < 0.03, "{kind:?}");
        }
        // 1 - sqrt falls steeply at first
        assert!(largest_jump(Wsd, [(50, 200), (120, 600)]) < 0.23);
        // at its end a schedule stays there
        let (schedule, end) = (schedule(Cosine), stretched(planned(100), 100, 500));
        assert!(schedule.of_step(99, 100) >= schedule.of_stretched(100, &end));
        assert!((100..500).all(|step| schedule.of_stretched(step, &end) > 0.0));
    }

    #[test]
    fn no_step_has_rate_zero() {
        let schedule = Schedule { warmup: Warmup::Share(0.04), ..schedule(SchedulerType::Cosine) };
        assert!((0..1000).all(|step| schedule.of_step(step, 1000) > 0.0));
    }
}
