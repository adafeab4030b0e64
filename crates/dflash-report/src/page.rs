//! The page: what the run is, its curves, its settings. Whatever comes from a file is escaped.

use serde_json::Value;

use crate::chart::{Chart, number};
use crate::run::Run;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;\
padding:0 1rem;color:#222}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}\
.charts{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 480px;max-width:580px}\
figcaption span{font-size:.85rem}svg{max-width:100%;height:auto}table{border-collapse:collapse}\
td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top;\
border-bottom:1px solid #eee;overflow-wrap:anywhere}td.n{text-align:right}\
.note{color:#a33}code{white-space:pre-wrap}";

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

/// Text as HTML shows it, in elements and in quoted attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(letter),
        }
    }
    escaped
}

fn charts(run: &Run) -> Vec<Chart> {
    let train = |key: &str| run.metrics.series(key);
    let held_out = |key: &str| run.validation.series(key);
    let wait = run.metrics.points(|line| {
        let from_seconds =
            || Some(line["data_wait_s"].as_f64()? / line["interval_s"].as_f64()?.max(1e-9));
        line["data_wait_share"].as_f64().or_else(from_seconds)
    });
    let over = Chart::over_steps;
    vec![
        over("Loss", vec![("training", train("loss")), ("validation", held_out("eval_loss"))]),
        over(
            "Accuracy",
            vec![("training", train("accuracy")), ("validation", held_out("eval_accuracy"))],
        ),
        over(
            "Accepted length",
            vec![
                ("expected, training", train("expected_accepted")),
                ("expected, validation", held_out("eval_expected_length")),
                ("measured, per step", held_out("tau_per_step")),
                ("measured, per response", held_out("tau_per_response")),
            ],
        ),
        by_slot(run),
        over("Learning rate", vec![("rate", train("lr"))]),
        over("Gradient norm", vec![("before clipping", train("gradient_norm"))]),
        over("Supervised slots per second", vec![("all ranks", train("slots_per_s"))]),
        over("Tokens per second", vec![("all ranks", train("tokens_per_s"))]),
        over("Useful TFLOP/s", vec![("all ranks", train("tflops"))]),
        over("Share of the devices' peak", vec![("MFU", train("mfu"))]),
        over("Share of the time spent waiting for data", vec![("rank 0", wait)]),
        over("Peak memory, MiB", vec![("rank 0", train("peak_memory_mib"))]),
    ]
}

/// Accuracy over the slots of a block, at the run's quarters.
fn by_slot(run: &Run) -> Chart {
    let steps: Vec<(&u64, &Value)> = run.metrics.by_step.iter().collect();
    let mut indices: Vec<usize> =
        (1..=4).filter_map(|quarter| (steps.len() * quarter / 4).checked_sub(1)).collect();
    indices.dedup();
    let lines = indices.into_iter().filter_map(|index| {
        let (step, line) = steps[index];
        let slots = line["slot_accuracy"].as_array()?.iter().enumerate();
        let points: Vec<(f64, f64)> =
            slots.filter_map(|(slot, share)| Some((slot as f64, share.as_f64()?))).collect();
        (!points.is_empty()).then(|| (format!("step {step}"), points))
    });
    Chart { title: "Accuracy by slot", axis: "slot", lines: lines.collect() }
}

/// What a reader should know about the files.
fn notes(run: &Run) -> String {
    let mut notes = String::new();
    for (name, lines) in [("metrics.jsonl", &run.metrics), ("validation.jsonl", &run.validation)] {
        if lines.broken > 0 {
            notes.push_str(&format!(
                "<p class=\"note\">{name}: {} broken line(s) left out.</p>\n",
                lines.broken
            ));
        }
        if lines.replaced > 0 {
            notes.push_str(&format!(
                "<p>{name}: {} line(s) replaced by later ones of the same step.</p>\n",
                lines.replaced
            ));
        }
    }
    if run.provenance.is_none() {
        notes.push_str("<p class=\"note\">run.json is missing or broken.</p>\n");
    }
    notes
}

/// Where the run stands, by its last lines.
fn summary(run: &Run) -> String {
    let keys = [
        ("step", "step"),
        ("epoch", "epoch"),
        ("loss", "loss, nats"),
        ("accuracy", "accuracy"),
        ("expected_accepted", "expected accepted length, tokens"),
        ("slots_per_s", "supervised slots per second"),
        ("tflops", "useful TFLOP/s"),
        ("mfu", "share of the devices' peak"),
        ("eta_s", "seconds left"),
        ("skipped_samples", "samples left out"),
        ("bad_steps", "steps with a non-finite gradient"),
    ];
    let measured = [
        ("step", "measured at step"),
        ("eval_loss", "validation loss, nats"),
        ("eval_expected_length", "validation, expected accepted length"),
        ("tau_per_step", "measured acceptance length per step"),
        ("tau_per_response", "measured acceptance length per response"),
    ];
    let rows = |line: Option<&Value>, keys: &[(&str, &str)]| -> String {
        let row = |&(key, name): &(&str, &str)| {
            let value = line?[key].as_f64()?;
            Some(format!("<tr><td>{name}</td><td class=\"n\">{}</td></tr>\n", number(value)))
        };
        keys.iter().filter_map(row).collect()
    };
    let rows = rows(run.metrics.last(), &keys) + &rows(run.validation.last(), &measured);
    format!("<table>\n{rows}</table>")
}

fn checkpoints(run: &Run) -> String {
    if run.checkpoints.is_empty() {
        return "<p>None yet.</p>".to_owned();
    }
    let rows: String = run
        .checkpoints
        .iter()
        .map(|checkpoint| {
            let mib = checkpoint.bytes as f64 / f64::from(1 << 20);
            let name = escape(&checkpoint.name);
            format!("<tr><td>{name}</td><td class=\"n\">{mib:.1} MiB</td></tr>\n")
        })
        .collect();
    format!("<table>\n{rows}</table>")
}

/// The command first, then every entry of run.json under its path.
fn provenance(run: &Run) -> String {
    let Some(provenance) = &run.provenance else {
        return "<p>Unknown: run.json is missing or broken.</p>".to_owned();
    };
    let mut rows = Vec::new();
    flatten("", provenance, &mut rows);
    let command = provenance["config"]["command"].as_array().map(|words| {
        let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
        format!("<p><code>{}</code></p>\n", escape(&words.join(" ")))
    });
    let rows: String = rows
        .iter()
        .filter(|(key, _)| key != "config.command" && key != "earlier_starts")
        .map(|(key, value)| {
            format!("<tr><td>{}</td><td>{}</td></tr>\n", escape(key), escape(value))
        })
        .collect();
    format!("{}{}<table>\n{rows}</table>", command.unwrap_or_default(), resumes(provenance))
}

/// At which steps the run went on.
fn resumes(provenance: &Value) -> String {
    let earlier = provenance["earlier_starts"].as_array().map_or(&[][..], Vec::as_slice);
    let steps: Vec<String> = earlier
        .iter()
        .chain([provenance])
        .filter_map(|start| start["resumed_at_step"].as_u64())
        .filter(|&step| step > 0)
        .map(|step| step.to_string())
        .collect();
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
