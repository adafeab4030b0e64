//! Values read back from the device. All reads of training go through here and are counted.
//!
//! GPU steps never synchronise with the host. A read makes the host wait until the device has
//! finished everything queued, and then the device waits for the host. So the loss denominator, the
//! gradient norm, clipping and the decision to skip a step are tensors; the optimizers and the
//! weight average obey a flag among them. A step's results stay on the device until a metric line,
//! a checkpoint or a validation needs them; then the results of all steps since are copied at once
//! and counted one by one, as on a CPU, where each is read at once. Votes and row counts are
//! exchanged on the host, which waits for no device.

use std::cell::Cell;

use dflash_draft::objective::Statistics;
use tch::{Device, Kind, Tensor};

use crate::trainer::{Effect, StepSums};
use crate::vote::Vote;

thread_local! {
    static READS: Cell<u64> = const { Cell::new(0) };
}

/// Who decides whether a step changes the weights, and how far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// The host, which reads the loss's denominator and the gradient's norm in each step.
    Host,
    /// The device; the host learns the outcome later.
    Device,
}

impl Control {
    /// The usual choice for a draft on `device`.
    pub(crate) fn of(device: Device) -> Self {
        match device {
            Device::Cuda(_) => Self::Device,
            _ => Self::Host,
        }
    }
}

/// A finished step whose outcome the host may not know yet.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Summed over ranks.
    pub(crate) sums: StepSums,
    /// The ranks' common vote.
    pub(crate) vote: Vote,
    pub(crate) outcome: Outcome,
}

/// Outcome of a step.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Known to the host.
    Known(StepOutcome),
    /// It is still on the device.
    Unread(Unread),
}

/// A step's results on the device.
#[derive(Debug)]
pub(crate) struct Unread {
    /// The sums of [`Statistics`] followed by the gradient norm, float64.
    pub(crate) record: Tensor,
    /// Names of the head's metrics among the sums.
    pub(crate) metrics: &'static [&'static str],
}

/// Results of a step.
#[derive(Debug)]
pub(crate) struct StepOutcome {
    pub(crate) effect: Effect,
    /// Global gradient norm before clipping, as computed by rank 0.
    pub(crate) gradient_norm: f64,
    /// Summed over ranks, on the host.
    pub(crate) statistics: Statistics,
}

impl StepOutcome {
    /// From the device's results, read back.
    fn of(Unread { record, metrics }: &Unread) -> Self {
        let width = record.numel() as i64 - 1;
        let statistics = Statistics::from_sums(record.narrow(0, 0, width), metrics);
        let denominator = statistics.denominator().double_value(&[]);
        let norm = record.double_value(&[width]);
        let (effect, gradient_norm) = match denominator {
            0.0 => (Effect::Empty, 0.0),
            _ if norm.is_finite() => (Effect::Moved, norm),
            _ => (Effect::NotFinite, norm),
        };
        Self { effect, gradient_norm, statistics }
    }
}

/// Reads the outcomes of steps, in order; those on the device in one copy.
pub(crate) fn read(outcomes: Vec<Outcome>) -> Vec<StepOutcome> {
    let unread: Vec<&Tensor> = outcomes
        .iter()
        .filter_map(|outcome| match outcome {
            Outcome::Known(_) => None,
            Outcome::Unread(unread) => Some(&unread.record),
        })
        .collect();
    let records = (!unread.is_empty()).then(|| to_host(&Tensor::stack(&unread, 0)));
    let mut row = 0..;
    let mut next = || records.as_ref().expect("a record is unread").get(row.next().unwrap_or(0));
    outcomes
        .into_iter()
        .map(|outcome| match outcome {
            Outcome::Known(outcome) => outcome,
            Outcome::Unread(Unread { metrics, .. }) => {
                StepOutcome::of(&Unread { record: next(), metrics })
            }
        })
        .collect()
}

/// A copy on the host.
pub(crate) fn to_host(tensor: &Tensor) -> Tensor {
    READS.set(READS.get() + 1);
    tensor.to_device(Device::Cpu)
}

/// All values of a tensor.
pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    let host = to_host(tensor).to_kind(Kind::Double).reshape([-1]);
    Vec::try_from(host).expect("one dimension of float64")
}

/// The value of a one-element tensor.
pub(crate) fn value(tensor: &Tensor) -> f64 {
    READS.set(READS.get() + 1);
    tensor.double_value(&[])
}

/// Number of reads by this thread so far.
#[cfg(test)]
pub(crate) fn count() -> u64 {
    READS.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(denominator: f64, norm: f64) -> Unread {
        // loss, denominator, accepted, blocks, one slot correct of one, a head's metric of 6 over 4
        let sums = [3.0, denominator, 2.0, 1.0, 1.0, 1.0, 6.0, 4.0, norm];
        Unread { record: Tensor::from_slice(&sums), metrics: &["gain"] }
    }

    #[test]
    fn steps_are_read_in_their_order_and_at_once() {
        let known = || {
            let statistics = Statistics::zero(1, &[], Device::Cpu);
            Outcome::Known(StepOutcome { effect: Effect::Empty, gradient_norm: 0.0, statistics })
        };
        let outcomes = vec![
            Outcome::Unread(record(2.0, 0.5)),
            known(),
            Outcome::Unread(record(2.0, f64::NAN)),
            Outcome::Unread(record(0.0, 7.0)),
            Outcome::Unread(record(f64::NAN, f64::NAN)),
        ];
        let before = count();
        let found = read(outcomes);
        assert_eq!(count() - before, 1);
        let effects: Vec<Effect> = found.iter().map(|outcome| outcome.effect).collect();
        let expected =
            [Effect::Moved, Effect::Empty, Effect::NotFinite, Effect::Empty, Effect::NotFinite];
        assert_eq!(effects, expected);
        assert_eq!((found[0].gradient_norm, found[3].gradient_norm), (0.5, 0.0));
        assert!(found[2].gradient_norm.is_nan());
        let report = found[0].statistics.report(0.0);
        assert_eq!((report.loss, report.of_head), (1.5, vec![("gain", 1.5)]));
        assert_eq!(found[0].statistics.blocks(), 1);
        assert!(read(vec![known()]).len() == 1 && count() - before == 1);
    }

    /// The code of a step, without tests.
    const STEP: [(&str, &str); 11] = [
        ("batch.rs", include_str!("batch.rs")),
        ("master_weights.rs", include_str!("master_weights.rs")),
        ("optimizer.rs", include_str!("optimizer.rs")),
        ("optimizer/adamw.rs", include_str!("optimizer/adamw.rs")),
        ("optimizer/groups.rs", include_str!("optimizer/groups.rs")),
        ("optimizer/muon.rs", include_str!("optimizer/muon.rs")),
        ("trainer.rs", include_str!("trainer.rs")),
        ("objective.rs", include_str!("../../../model/dflash-draft/src/objective.rs")),
        (
            "objective/element.rs",
            include_str!("../../../model/dflash-draft/src/objective/element.rs"),
        ),
        (
            "objective/placed.rs",
            include_str!("../../../model/dflash-draft/src/objective/placed.rs"),
        ),
        (
            "objective/weight.rs",
            include_str!("../../../model/dflash-draft/src/objective/weight.rs"),
        ),
    ];

    /// Calls that synchronise, because a value or shape depends on values on the device.
    const WAITS: [&str; 9] = [
        ".double_value(",
        ".int64_value(",
        "::try_from(",
        ".to_device(Device::Cpu)",
        ".nonzero(",
        ".masked_select(",
        ".copy_data(",
        ".equal(",
        ".i((",
    ];

    #[test]
    fn no_read_of_a_step_goes_uncounted() {
        for (name, code) in STEP {
            let code = code.split("#[cfg(test)]").next().unwrap_or_default();
            for wait in WAITS {
                assert!(!code.contains(wait), "{name} has {wait}");
            }
        }
    }
}
