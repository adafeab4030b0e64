//! The curves of a run.

use dflash_run::{AcceptanceFigures, MetricLine, TeacherForced, ValidationLine};

use crate::chart::Chart;
use crate::run::Run;

/// What the draft learns.
pub(super) fn learning(run: &Run) -> String {
    let both = |of: fn(&TeacherForced) -> Option<f64>| {
        let rows = |line: &ValidationLine| of(&line.rows.as_ref()?.figures);
        (run.metrics.points(|line| of(&line.figures)), run.validation.points(rows))
    };
    let measured = |of: fn(&AcceptanceFigures) -> f64| {
        run.validation.points(|line| Some(of(&line.prompts.as_ref()?.figures)))
    };
    let (loss, held_out_loss) = both(|figures| figures.loss);
    let (accuracy, held_out_accuracy) = both(|figures| figures.accuracy.map(|it| 100.0 * it));
    let (expected, held_out_expected) = both(|figures| figures.expected_acceptance_length);
    let over = Chart::over_steps;
    let charts = [
        over(
            "Acceptance length",
            "tokens per step",
            vec![
                ("expected, training", expected),
                ("expected, held-out rows", held_out_expected),
                ("measured, over steps", measured(|figures| figures.acceptance_length)),
                (
                    "measured, mean of answers",
                    measured(|figures| figures.acceptance_length_per_response),
                ),
            ],
        ),
        over("Loss", "nats", vec![("training", loss), ("held-out rows", held_out_loss)]),
        over(
            "Accuracy",
            "% of slots",
            vec![("training", accuracy), ("held-out rows", held_out_accuracy)],
        ),
    ];
    charts.iter().map(Chart::html).collect()
}

/// How fast it learns, and what it costs.
pub(super) fn speed(run: &Run) -> String {
    let train = |of: fn(&MetricLine) -> Option<f64>| run.metrics.points(of);
    let percent = |share: Option<f64>| share.map(|share| 100.0 * share);
    let over = Chart::over_steps;
    let charts = [
        over(
            "Time that is not the trainer's own",
            "% of the interval",
            vec![
                ("waiting for data", train(|line| wait_share(line).map(|it| 100.0 * it))),
                ("the target's passes", run.metrics.points(|line| percent(line.target_share))),
            ],
        ),
        over("Tokens per second", "all ranks", vec![("tokens", train(|line| line.tokens_per_s))]),
        over(
            "Supervised slots per second",
            "all ranks",
            vec![("slots", train(|line| line.slots_per_s))],
        ),
        over("Useful arithmetic", "TFLOP/s", vec![("all ranks", train(|line| line.tflops))]),
        over(
            "Share of the devices' peak",
            "%",
            vec![("MFU", run.metrics.points(|line| percent(line.mfu)))],
        ),
        over("Learning rate", "", vec![("rate", train(|line| line.lr))]),
        over("Gradient norm", "before clipping", vec![("norm", train(|line| line.gradient_norm))]),
        over("Peak memory", "MiB, rank 0", vec![("memory", train(|line| line.peak_memory_mib))]),
    ];
    charts.iter().map(Chart::html).collect()
}

/// Runs of earlier releases record only the seconds.
pub(super) fn wait_share(line: &MetricLine) -> Option<f64> {
    line.data_wait_share.or_else(|| Some(line.data_wait_s? / line.interval_s?.max(1e-9)))
}

/// By slot of a block: how often the guess is right, and how often it is accepted.
pub(super) fn slots(run: &Run) -> String {
    let train: Vec<(u64, &[Option<f64>])> = run
        .metrics
        .by_step
        .values()
        .map(|line| (line.step, line.figures.accuracy_by_slot.as_slice()))
        .collect();
    let measured: Vec<(u64, &[Option<f64>])> = run
        .validation
        .by_step
        .values()
        .filter_map(|line| {
            let slots = &line.prompts.as_ref()?.figures.acceptance_by_slot;
            Some((line.step, slots.as_slice()))
        })
        .collect();
    by_slot("Accuracy by slot", "% right, in training", &train)
        + &by_slot("Acceptance by slot", "% of steps, measured", &measured)
}

/// A line at each quarter of `all`, which are steps with their shares by slot.
fn by_slot(title: &str, unit: &'static str, all: &[(u64, &[Option<f64>])]) -> String {
    let mut indices: Vec<usize> =
        (1..=4).filter_map(|quarter| (all.len() * quarter / 4).checked_sub(1)).collect();
    indices.dedup();
    let lines = indices.into_iter().filter_map(|index| {
        let (step, slots) = all[index];
        let points = slots.iter().enumerate();
        let points: Vec<(f64, f64)> =
            points.filter_map(|(slot, share)| Some((slot as f64, 100.0 * (*share)?))).collect();
        (!points.is_empty()).then(|| (format!("step {step}"), points))
    });
    Chart { title: title.to_owned(), unit, axis: "slot", lines: lines.collect() }.html()
}
