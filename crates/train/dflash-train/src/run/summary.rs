//! The closing summary of a run, taken from its position and directory.

use std::time::Duration;

use dflash_run::{MetricLine, Position, RunDir, ValidationLine};

/// Summarises a run of `total` steps that this process started or resumed at `begun_at`. Leaves out
/// whatever cannot be read: a run must not fail because of its summary.
pub(super) fn closing(
    how: &str,
    run: &RunDir,
    position: &Position,
    begun_at: u64,
    total: u64,
    elapsed: Duration,
) -> String {
    let step = position.step;
    let own = match begun_at {
        0 => String::new(),
        _ => format!(", {} of them now", step.saturating_sub(begun_at)),
    };
    let lines = [
        Some(format!("{how}: {step} of {total} steps{own}, {} of training", duration(elapsed))),
        trained(run, step),
        validated(run),
        best(run),
        Some(format!(
            "  {} samples, {} tokens, {} anchors; {} samples skipped, {} bad steps",
            position.samples,
            position.tokens,
            position.anchors,
            position.skipped_samples,
            position.bad_steps,
        )),
        run.latest().ok().flatten().map(|latest| format!("  checkpoint {}", latest.dir.display())),
    ];
    lines.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

/// Figures of the last metric line.
fn trained(run: &RunDir, step: u64) -> Option<String> {
    let lines = run.lines::<MetricLine>().ok()?;
    let last = lines.last().filter(|line| line.step <= step)?;
    let before = lines.by_step.range(..last.step).next_back().map_or(0, |(step, _)| *step);
    let figures = &last.figures;
    let over = match last.step - before {
        1 => "the last step".to_owned(),
        steps => format!("the last {steps} steps"),
    };
    Some(format!(
        "  loss {}, expected acceptance length {} over {over}",
        shown(figures.loss, 4),
        shown(figures.expected_acceptance_length, 2)
    ))
}

/// Figures of the last validation.
fn validated(run: &RunDir) -> Option<String> {
    let lines = run.lines::<ValidationLine>().ok()?;
    let last = lines.last()?;
    let mut parts = Vec::new();
    if let Some(rows) = &last.rows {
        parts.push(format!("loss {}", shown(rows.figures.loss, 4)));
        let expected = shown(rows.figures.expected_acceptance_length, 2);
        parts.push(format!("expected acceptance length {expected}"));
    }
    if let Some(prompts) = &last.prompts {
        parts.push(format!("acceptance length (tau) {:.3}", prompts.figures.acceptance_length));
    }
    Some(format!("  validation at step {}: {}", last.step, parts.join(", ")))
}

fn best(run: &RunDir) -> Option<String> {
    let best = run.best().ok()??;
    let (quantity, value) = best.quantity()?;
    Some(format!("  best {quantity} {value:.3} at step {}", best.step))
}

fn shown(figure: Option<f64>, digits: usize) -> String {
    figure.map_or_else(|| "unknown".to_owned(), |figure| format!("{figure:.digits$}"))
}

/// Seconds with one digit, or longer times in their two largest units.
fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use dflash_run::{Acceptance, HeldOutPrompts, TeacherForced};

    use super::*;

    #[test]
    fn times_have_two_units_at_most() {
        let texts = [3.42, 62.0, 3599.9, 3600.0, 90_061.0]
            .map(|seconds| duration(Duration::from_secs_f64(seconds)));
        assert_eq!(texts, ["3.4 s", "1 min 2 s", "59 min 59 s", "1 h 0 min", "25 h 1 min"]);
    }

    #[test]
    fn the_words_are_what_the_files_say() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::at(dir.path());
        let position = Position { step: 12, samples: 48, tokens: 700, ..Position::default() };
        let position = Position { anchors: 90, skipped_samples: 3, bad_steps: 1, ..position };
        let said =
            |begun_at| closing("done", &run, &position, begun_at, 12, Duration::from_millis(3420));
        let totals = "  48 samples, 700 tokens, 90 anchors; 3 samples skipped, 1 bad steps";
        let empty = format!("done: 12 of 12 steps, 5 of them now, 3.4 s of training\n{totals}");
        assert_eq!(said(7), empty);
        let figures = |loss| TeacherForced { loss, ..TeacherForced::default() };
        for (step, loss) in [(10, 2.0), (12, 1.5)] {
            let figures = figures(Some(loss));
            run.append(&MetricLine { step, figures, ..MetricLine::default() }).unwrap();
        }
        let acceptance = Acceptance { reached: vec![2, 1], responses: 1, length_sum: 1.5 };
        let prompts = Some(HeldOutPrompts { figures: acceptance.figures(), responses: 1 });
        run.append(&ValidationLine { step: 12, prompts, ..ValidationLine::default() }).unwrap();
        std::fs::write(dir.path().join("best.json"), r#"{"step":8,"acceptance_length":1.75}"#)
            .unwrap();
        let checkpoint = dir.path().join("step-000012");
        std::fs::create_dir(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("config.json"), "{}").unwrap();
        let expected = format!(
            "done: 12 of 12 steps, 3.4 s of training\n  \
             loss 1.5000, expected acceptance length unknown over the last 2 steps\n  \
             validation at step 12: acceptance length (tau) 1.500\n  \
             best acceptance length 1.750 at step 8\n\
             {totals}\n  checkpoint {}",
            checkpoint.display()
        );
        assert_eq!(said(0), expected);
    }
}
