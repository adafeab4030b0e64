//! docs/formats.md and FILES.md list all keys that are written, in order.

use dflash_run::{
    AcceptanceFigures, Agreement, Best, HeldOutPrompts, HeldOutRows, MetricLine, Position,
    Provenance, SchedulePosition, SourceCheck, Start, State, StreamCounters, TeacherForced,
    ValidationLine,
};
use serde::Serialize;
use serde_json::Value;

/// Where each file of a run is described: what users read in the book, the rest with the crate.
const FORMATS: &str = include_str!("../../../../docs/formats.md");
const FILES: &str = include_str!("../FILES.md");

/// The first column of the table under a heading; FILES.md goes first, since the book's heading of the
/// same name has no table.
fn documented(heading: &str) -> Vec<String> {
    let line = format!("### {heading}\n");
    let found = FILES.split_once(&line).or_else(|| FORMATS.split_once(&line));
    let (_, section) = found.expect(heading);
    let section = section.split("\n#").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    cells.map(|(key, _)| key.to_owned()).collect()
}

/// The keys of a value; keys of nested objects (also of a list's first element) follow a dot.
fn keys(value: &Value, prefix: &str) -> Vec<String> {
    let inner = |value: &Value, path: String| match value {
        Value::Array(items) if items.first().is_some_and(Value::is_object) => {
            keys(&items[0], &(path + "."))
        }
        Value::Object(members) if !members.is_empty() => keys(value, &(path + ".")),
        _ => vec![path],
    };
    let members = value.as_object().unwrap().iter();
    members.flat_map(|(key, value)| inner(value, format!("{prefix}{key}"))).collect()
}

fn check(heading: &str, value: &impl Serialize) {
    let written = keys(&serde_json::to_value(value).unwrap(), "");
    assert_eq!(documented(heading), written, "under {heading} in docs/formats.md or FILES.md");
}

#[test]
fn every_key_is_documented() {
    let metrics = MetricLine {
        ema_decay: Some(0.99),
        target_s: Some(1.0),
        target_share: Some(0.5),
        stream: Some(StreamCounters::default()),
        ..MetricLine::default()
    };
    check("metrics.jsonl", &metrics);
    let validation = ValidationLine {
        rows: Some(HeldOutRows::default()),
        prompts: Some(HeldOutPrompts::default()),
        ..ValidationLine::default()
    };
    check("validation.jsonl", &validation);
    let earlier_starts = vec![Start::default()];
    let log_probabilities = Some(Agreement::default());
    let source_checks = vec![SourceCheck { log_probabilities, ..SourceCheck::default() }];
    let made = Provenance { earlier_starts, source_checks, ..Provenance::default() };
    check("run.json", &made);
    check("best.json", &Best::default());
    let schedule = Some(SchedulePosition { planned: 1, total: 1, since: 0, at: 0.0 });
    let position = Position { schedule, ..Position::default() };
    check("trainer/state.json", &State { position, tensors_crc32: None });
}

#[test]
fn every_figure_is_in_the_table_of_names() {
    let forced = serde_json::to_value(TeacherForced::default()).unwrap();
    let measured = serde_json::to_value(AcceptanceFigures::default()).unwrap();
    let mut names = [keys(&forced, ""), keys(&measured, "")].concat();
    names.push("responses".to_owned());
    assert_eq!(documented("Names of metrics"), names);
}
