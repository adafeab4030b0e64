//! The page: the run's state, curves and settings. All text from files is escaped.

use crate::chart::{Chart, STYLE, escape, number};
use dflash_run::{
    AcceptanceFigures, Checkpoint, Line, Lines, MetricLine, Provenance, RunDir, TeacherForced,
    ValidationLine,
};
use serde_json::Value;

use crate::run::Run;

/// The whole page of `run`.
pub(crate) fn html(run: &Run) -> String {
    let title = escape(&run.dir.display().to_string());
    let charts: String = charts(run).iter().map(Chart::html).collect();
    let charts = match charts.is_empty() {
        true => "<p>No metrics yet.</p>".to_owned(),
        false => format!("<div class=\"charts\">\n{charts}</div>"),
    };
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>dflash: {title}</title><style>{STYLE}</style></head><body>\n\
         <h1>Training run {title}</h1>\n{}{}\n<h2>Curves</h2>\n{charts}\n\
         <h2>Checkpoints</h2>\n{}\n<h2>Provenance</h2>\n{}\n</body></html>\n",
        notes(run),
        summary(run),
        checkpoints(run),
        provenance(run),
    )
}

fn charts(run: &Run) -> Vec<Chart> {
    let train = |of: fn(&MetricLine) -> Option<f64>| run.metrics.points(of);
    let both = |of: fn(&TeacherForced) -> Option<f64>| {
        let rows = |line: &ValidationLine| of(&line.rows.as_ref()?.figures);
        (run.metrics.points(|line| of(&line.figures)), run.validation.points(rows))
    };
    let measured = |of: fn(&AcceptanceFigures) -> f64| {
        run.validation.points(|line| Some(of(&line.prompts.as_ref()?.figures)))
    };
    let (loss, held_out_loss) = both(|figures| figures.loss);
    let (accuracy, held_out_accuracy) = both(|figures| figures.accuracy);
    let (expected, held_out_expected) = both(|figures| figures.expected_acceptance_length);
    let per_step = measured(|figures| figures.acceptance_length);
    let per_response = measured(|figures| figures.acceptance_length_per_response);
    let over = Chart::over_steps;
    vec![
        over("Loss", vec![("training", loss), ("validation", held_out_loss)]),
        over("Accuracy", vec![("training", accuracy), ("validation", held_out_accuracy)]),
        over(
            "Acceptance length",
            vec![
                ("expected, training", expected),
                ("expected, validation", held_out_expected),
                ("measured, per step", per_step),
                ("measured, per response", per_response),
            ],
        ),
        by_slot(run),
        over("Learning rate", vec![("rate", train(|line| line.lr))]),
        over("Gradient norm", vec![("before clipping", train(|line| line.gradient_norm))]),
        over("Supervised slots per second", vec![("all ranks", train(|line| line.slots_per_s))]),
        over("Tokens per second", vec![("all ranks", train(|line| line.tokens_per_s))]),
        over("Useful TFLOP/s", vec![("all ranks", train(|line| line.tflops))]),
        over("Share of the devices' peak", vec![("MFU", train(|line| line.mfu))]),
        over("Share of the time spent waiting for data", vec![("rank 0", train(wait_share))]),
        over("Peak memory, MiB", vec![("rank 0", train(|line| line.peak_memory_mib))]),
    ]
}

/// Runs of earlier releases record only the seconds.
fn wait_share(line: &MetricLine) -> Option<f64> {
    line.data_wait_share.or_else(|| Some(line.data_wait_s? / line.interval_s?.max(1e-9)))
}

/// Accuracy by slot of a block, at each quarter of the run.
fn by_slot(run: &Run) -> Chart {
    let lines: Vec<&MetricLine> = run.metrics.by_step.values().collect();
    let mut indices: Vec<usize> =
        (1..=4).filter_map(|quarter| (lines.len() * quarter / 4).checked_sub(1)).collect();
    indices.dedup();
    let lines = indices.into_iter().filter_map(|index| {
        let slots = lines[index].figures.accuracy_by_slot.iter().enumerate();
        let points: Vec<(f64, f64)> =
            slots.filter_map(|(slot, share)| Some((slot as f64, (*share)?))).collect();
        (!points.is_empty()).then(|| (format!("step {}", lines[index].step), points))
    });
    Chart { title: "Accuracy by slot".to_owned(), axis: "slot", lines: lines.collect() }
}

/// Problems with the files that a reader should know.
fn notes(run: &Run) -> String {
    let mut notes = lines_note(&run.metrics) + &lines_note(&run.validation);
    if run.provenance.is_none() {
        let name = RunDir::PROVENANCE;
        notes.push_str(&format!("<p class=\"note\">{name} is missing or broken.</p>\n"));
    }
    notes
}

fn lines_note<T: Line>(lines: &Lines<T>) -> String {
    let (name, Lines { broken, replaced, .. }) = (T::FILE, lines);
    let mut note = String::new();
    if *broken > 0 {
        note += &format!("<p class=\"note\">{name}: {broken} broken line(s) left out.</p>\n");
    }
    if *replaced > 0 {
        note += &format!(
            "<p>{name}: {replaced} line(s) replaced by later ones of the same step.</p>\n"
        );
    }
    note
}

/// The run's state, from its last lines.
fn summary(run: &Run) -> String {
    let train = run.metrics.last().map(|line| {
        let figures = &line.figures;
        rows(&[
            ("step", Some(line.step as f64)),
            ("epoch", line.epoch),
            ("loss, nats", figures.loss),
            ("accuracy", figures.accuracy),
            ("expected acceptance length, tokens", figures.expected_acceptance_length),
            ("supervised slots per second", line.slots_per_s),
            ("useful TFLOP/s", line.tflops),
            ("share of the devices' peak", line.mfu),
            ("seconds left", line.eta_s),
            ("samples left out", Some(line.skipped_samples as f64)),
            ("steps with a non-finite gradient", Some(line.bad_steps as f64)),
        ])
    });
    let validation = run.validation.last().map(|line| {
        let forced = line.rows.clone().unwrap_or_default().figures;
        let measured = line.prompts.as_ref().map(|prompts| &prompts.figures);
        rows(&[
            ("validated at step", Some(line.step as f64)),
            ("validation loss, nats", forced.loss),
            ("validation, expected acceptance length", forced.expected_acceptance_length),
            (
                "measured acceptance length per step",
                measured.map(|figures| figures.acceptance_length),
            ),
            (
                "measured acceptance length per response",
                measured.map(|figures| figures.acceptance_length_per_response),
            ),
        ])
    });
    let stream = run.metrics.last().and_then(|line| line.stream).map(|stream| {
        rows(&[
            ("requests for hidden states", Some(stream.requests as f64)),
            ("retried", Some(stream.retries as f64)),
            ("put off by a busy server", Some(stream.busy as f64)),
            ("samples generated by a server", Some(stream.generated as f64)),
            ("samples read from stored files", Some(stream.stored as f64)),
            ("stale stored files", Some(stream.stale as f64)),
            ("samples missing", Some(stream.missing as f64)),
            ("samples rejected by the server", Some(stream.rejected as f64)),
            ("samples with invalid hidden states", Some(stream.invalid as f64)),
            ("messages damaged on the way", Some(stream.damaged as f64)),
            ("samples cached", Some(stream.cached as f64)),
            ("MiB of hidden states", Some(stream.bytes as f64 / f64::from(1 << 20))),
        ])
    });
    let parts = [train, validation, stream].into_iter().flatten();
    format!("<table>\n{}</table>", parts.collect::<String>())
}

/// One row per known value.
fn rows(figures: &[(&str, Option<f64>)]) -> String {
    let row = |&(name, figure): &(&str, Option<f64>)| {
        let figure = number(figure.filter(|figure| figure.is_finite())?);
        Some(format!("<tr><td>{name}</td><td class=\"n\">{figure}</td></tr>\n"))
    };
    figures.iter().filter_map(row).collect()
}

fn checkpoints(run: &Run) -> String {
    if run.checkpoints.is_empty() {
        return "<p>None yet.</p>".to_owned();
    }
    let row = |checkpoint: &Checkpoint| {
        let mib = checkpoint.bytes() as f64 / f64::from(1 << 20);
        let name = checkpoint.dir.file_name().unwrap_or_default().to_string_lossy();
        format!("<tr><td>{}</td><td class=\"n\">{mib:.1} MiB</td></tr>\n", escape(&name))
    };
    let rows: String = run.checkpoints.iter().map(row).collect();
    format!("<table>\n{rows}</table>")
}

/// The command first, then every entry of run.json under its path.
fn provenance(run: &Run) -> String {
    let Some(provenance) = &run.provenance else {
        return format!("<p>Unknown: {} is missing or broken.</p>", RunDir::PROVENANCE);
    };
    let command = provenance.command().map_or_else(String::new, |words| {
        format!("<p><code>{}</code></p>\n", escape(&words.join(" ")))
    });
    let mut rows = Vec::new();
    flatten("", &serde_json::to_value(provenance).expect("settings print"), &mut rows);
    let rows: String = rows
        .iter()
        .filter(|(key, _)| key != "config.command" && key != "earlier_starts")
        .map(|(key, value)| {
            format!("<tr><td>{}</td><td>{}</td></tr>\n", escape(key), escape(value))
        })
        .collect();
    format!("{command}{}<table>\n{rows}</table>", resumes(provenance))
}

/// The steps at which the run was resumed.
fn resumes(provenance: &Provenance) -> String {
    let steps: Vec<String> = provenance.resumes().iter().map(u64::to_string).collect();
    if steps.is_empty() {
        return String::new();
    }
    format!("<p>Resumed {} time(s), at step {}.</p>\n", steps.len(), steps.join(", "))
}

fn flatten(path: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, value, rows);
            }
        }
        Value::String(text) => rows.push((path.to_owned(), text.clone())),
        other => rows.push((path.to_owned(), other.to_string())),
    }
}
