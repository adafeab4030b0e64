//! What happened, and what a run was made of.

use dflash_run::{Best, Provenance, RunDir, StreamCounters, ValidationLine};
use serde_json::Value;

use crate::chart::escape;
use crate::run::{Run, Saved};
use crate::standing::speed_up;
use crate::text::{bytes, count, counted, duration};

/// Events that are shown without unfolding.
const SHOWN: usize = 12;
/// What the reader of a run looks for first in its settings, under their names there.
const FIRST: [&str; 6] =
    ["dflash", "libtorch", "world_size", "target.name", "dataset", "data.rows"];

/// Something that happened at a step.
struct Event {
    step: u64,
    is_fault: bool,
    text: String,
}

/// Newest first.
pub(super) fn events(run: &Run) -> String {
    let kinds = [line_events(run), validations(run), saves(run), starts(run)];
    let mut all: Vec<Event> = kinds.into_iter().flatten().collect();
    if all.is_empty() {
        return String::new();
    }
    all.sort_by_key(|event| std::cmp::Reverse(event.step));
    let (shown, folded) = all.split_at(all.len().min(SHOWN));
    let folded = match folded.is_empty() {
        true => String::new(),
        false => format!(
            "<details><summary>{} earlier</summary>{}</details>",
            counted(folded.len() as u64, "event", "events"),
            list(folded)
        ),
    };
    format!("<h2>Events</h2>\n{}{folded}\n", list(shown))
}

fn list(events: &[Event]) -> String {
    let item = |event: &Event| {
        let class = if event.is_fault { " class=\"fault\"" } else { "" };
        format!(
            "<li><span class=\"when\">step {}</span><span{class}>{}</span></li>\n",
            event.step,
            escape(&event.text)
        )
    };
    format!("<ol class=\"events\">\n{}</ol>\n", events.iter().map(item).collect::<String>())
}

/// What grew from one line to the next and should not.
fn line_events(run: &Run) -> Vec<Event> {
    let mut events = Vec::new();
    let (mut bad, mut skipped) = (0, 0);
    for line in run.metrics.by_step.values() {
        let step = line.step;
        if line.bad_steps > bad {
            let steps = counted(line.bad_steps - bad, "step", "steps");
            let text = format!("{steps} with a gradient that is not finite");
            events.push(Event { step, is_fault: true, text });
        }
        if line.skipped_samples > skipped {
            let samples = counted(line.skipped_samples - skipped, "sample", "samples");
            events.push(Event { step, is_fault: false, text: format!("{samples} left out") });
        }
        (bad, skipped) = (line.bad_steps, line.skipped_samples);
    }
    events
}

fn validations(run: &Run) -> Vec<Event> {
    let best = run.best.map(|best| best.step);
    let event = |(&step, line): (&u64, &ValidationLine)| {
        let mut parts = Vec::new();
        if let Some(prompts) = &line.prompts {
            let tokens = prompts.figures.acceptance_length;
            parts.push(format!("acceptance length {tokens:.2} measured"));
        }
        if let Some(rows) = &line.rows {
            let expected = rows.figures.expected_acceptance_length;
            parts.extend(expected.map(|expected| format!("{expected:.2} expected")));
            parts.extend(rows.figures.loss.map(|loss| format!("loss {loss:.3}")));
        }
        let took = line.seconds.map(|seconds| format!(" in {}", duration(seconds)));
        let mark = if best == Some(step) { " (the best so far)" } else { "" };
        let text = format!("validated{}: {}{mark}", took.unwrap_or_default(), parts.join(", "));
        Event { step, is_fault: false, text }
    };
    run.validation.by_step.iter().map(event).collect()
}

fn saves(run: &Run) -> Vec<Event> {
    let event = |saved: &Saved| Event {
        step: saved.checkpoint.step,
        is_fault: saved.is_diverged,
        text: match saved.is_diverged {
            true => "checkpoint of a run that had diverged".to_owned(),
            false => format!("checkpoint saved, {}", bytes(saved.bytes as f64)),
        },
    };
    run.saved.iter().map(event).collect()
}

fn starts(run: &Run) -> Vec<Event> {
    let Some(provenance) = &run.provenance else { return Vec::new() };
    let resumes = provenance.resumes().into_iter();
    let event = |(step, text): (u64, &str)| Event { step, is_fault: false, text: text.to_owned() };
    let first = (!run.metrics.by_step.is_empty()).then_some((0, "started"));
    first.into_iter().chain(resumes.map(|step| (step, "resumed"))).map(event).collect()
}

pub(super) fn checkpoints(run: &Run) -> String {
    if run.saved.is_empty() {
        return "<h2>Checkpoints</h2>\n<p class=\"muted\">None yet.</p>\n".to_owned();
    }
    let rows: String = run.saved.iter().rev().map(|saved| checkpoint(run, saved)).collect();
    format!(
        "<h2>Checkpoints</h2>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Checkpoints\"><table>\n<thead><tr>\
         <th scope=\"col\">checkpoint</th><th scope=\"col\">state</th>\
         <th scope=\"col\" class=\"n\">acceptance length</th><th scope=\"col\" class=\"n\">speed-up</th>\
         <th scope=\"col\" class=\"n\">size</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )
}

fn checkpoint(run: &Run, saved: &Saved) -> String {
    let step = saved.checkpoint.step;
    let name = saved.checkpoint.dir.file_name().unwrap_or_default().to_string_lossy();
    let best = run.best.filter(|best| best.step == step);
    let state = match (saved.is_diverged, best) {
        (true, _) => "diverged",
        (_, Some(_)) => "best",
        _ => "",
    };
    let line = run.validation.by_step.get(&step);
    let measured = line.and_then(|line| Some(line.prompts.as_ref()?.figures.acceptance_length));
    let length = measured.or(best.as_ref().and_then(Best::quantity).map(|(_, value)| value));
    let length = length.map_or("\u{2013}".to_owned(), |length| format!("{length:.2}"));
    let speed = saved.evaluations.first().map_or("\u{2013}".to_owned(), speed_up);
    let class = if saved.is_diverged { " class=\"fault\"" } else { "" };
    format!(
        "<tr{class}><th scope=\"row\" class=\"keep\">{}</th><td class=\"keep\">{state}</td>\
         <td class=\"n\">{length}</td><td class=\"n\">{speed}</td><td class=\"n\">{}</td></tr>\n",
        escape(&name),
        bytes(saved.bytes as f64)
    )
}

/// A counter's name, and whether a count is a fault.
type Counter = (&'static str, u64, bool);

fn counters(stream: &StreamCounters) -> [Counter; 11] {
    [
        ("requests for hidden states", stream.requests, false),
        ("samples generated by a server", stream.generated, false),
        ("samples read from stored files", stream.stored, false),
        ("samples cached", stream.cached, false),
        ("requests put off by a busy server", stream.busy, false),
        ("requests retried", stream.retries, false),
        ("stored files that were stale", stream.stale, false),
        ("messages damaged on the way", stream.damaged, true),
        ("samples missing", stream.missing, true),
        ("samples rejected by the server", stream.rejected, true),
        ("samples with invalid hidden states", stream.invalid, true),
    ]
}

/// Counts of requests for hidden states: those that are zero are folded away.
pub(super) fn requests(run: &Run) -> String {
    let Some(stream) = run.metrics.last().and_then(|line| line.stream) else {
        return String::new();
    };
    let all = counters(&stream);
    let (zero, counted_up): (Vec<&Counter>, Vec<&Counter>) =
        all.iter().partition(|(_, count, _)| *count == 0);
    let rows: String = counted_up
        .iter()
        .map(|(name, number, is_fault)| {
            let class = if *is_fault { " class=\"fault\"" } else { "" };
            format!(
                "<tr{class}><th scope=\"row\">{name}</th><td class=\"n\">{}</td></tr>\n",
                count(*number)
            )
        })
        .collect();
    let volume = format!(
        "<tr><th scope=\"row\">volume of hidden states</th><td class=\"n\">{}</td></tr>\n",
        bytes(stream.bytes as f64)
    );
    let names: Vec<&str> = zero.iter().map(|(name, _, _)| *name).collect();
    format!(
        "<h2>Hidden states</h2>\n<div class=\"scroll\"><table class=\"facts\"><tbody>\n{rows}{volume}\
         </tbody></table></div>\n<details><summary>{} at zero</summary><p class=\"muted\">{}</p></details>\n",
        counted(zero.len() as u64, "count", "counts"),
        names.join(", ")
    )
}

/// The command and the main facts; every entry of run.json, under its path, is folded away.
pub(super) fn provenance(run: &Run) -> String {
    let Some(provenance) = &run.provenance else {
        let name = RunDir::PROVENANCE;
        return format!("<h2>Provenance</h2>\n<p>Unknown: {name} is missing or broken.</p>\n");
    };
    let command = provenance.command().map_or_else(String::new, |words| {
        format!("<code class=\"command\">{}</code>\n", escape(&words.join(" ")))
    });
    let mut rows = Vec::new();
    flatten("", &serde_json::to_value(provenance).expect("settings print"), &mut rows);
    rows.retain(|(key, _)| key != "config.command" && key != "earlier_starts");
    let (first, rest): (Vec<_>, Vec<_>) =
        rows.into_iter().partition(|(key, _)| FIRST.contains(&key.as_str()));
    format!(
        "<h2>Provenance</h2>\n{command}{}{}<details id=\"settings\"><summary>{} more</summary>{}</details>\n",
        resumes(provenance),
        facts(&first),
        counted(rest.len() as u64, "entry", "entries"),
        facts(&rest)
    )
}

/// A table of names and values.
fn facts(rows: &[(String, String)]) -> String {
    let rows: String = rows
        .iter()
        .map(|(key, value)| {
            format!("<tr><th scope=\"row\">{}</th><td>{}</td></tr>\n", escape(key), escape(value))
        })
        .collect();
    format!("<div class=\"scroll\"><table class=\"facts\"><tbody>\n{rows}</tbody></table></div>\n")
}

/// The steps at which the run was resumed.
fn resumes(provenance: &Provenance) -> String {
    let steps: Vec<String> = provenance.resumes().iter().map(u64::to_string).collect();
    if steps.is_empty() {
        return String::new();
    }
    let times = counted(steps.len() as u64, "time", "times");
    format!("<p>Resumed {times}, at step {}.</p>\n", steps.join(", "))
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
        Value::Null => {}
        other => rows.push((path.to_owned(), other.to_string())),
    }
}
