//! docs/formats.md names the keys that are written, all of them and in their order.

use dflash_run::{
    AcceptanceFigures, Best, HeldOutPrompts, HeldOutRows, MetricLine, Position, Provenance, Start,
    State, StreamCounters, TeacherForced, ValidationLine,
};
use serde::Serialize;
use serde_json::Value;

const FORMATS: &str = include_str!("../../../docs/formats.md");

/// The first column of the table under a heading.
fn documented(heading: &str) -> Vec<String> {
    let (_, section) = FORMATS.split_once(&format!("### {heading}\n")).expect(heading);
    let section = section.split("\n#").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    cells.map(|(key, _)| key.to_owned()).collect()
}

/// The keys of a value; those of objects inside, also of the first in a list, after a dot.
fn keys(value: &Value, prefix: &str) -> Vec<String> {
    let inner = |value: &Value, path: String| match value {
        Value::Array(items) if items.first().is_some_and(Value::is_object) => {
            keys(&items[0], &(path + "."))
        }
        Value::Object(_) => keys(value, &(path + ".")),
        _ => vec![path],
    };
    let members = value.as_object().unwrap().iter();
    members.flat_map(|(key, value)| inner(value, format!("{prefix}{key}"))).collect()
}

fn check(heading: &str, value: &impl Serialize) {
    let written = keys(&serde_json::to_value(value).unwrap(), "");
    assert_eq!(documented(heading), written, "under {heading} in docs/formats.md");
}

#[test]
fn every_key_is_documented() {
    let metrics = MetricLine {
        ema_decay: Some(0.99),
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
    check("run.json", &Provenance { earlier_starts, ..Provenance::default() });
    check("best.json", &Best::default());
    check("trainer/state.json", &State { position: Position::default(), tensors_crc32: None });
}

#[test]
fn every_figure_is_in_the_table_of_names() {
    let forced = serde_json::to_value(TeacherForced::default()).unwrap();
    let measured = serde_json::to_value(AcceptanceFigures::default()).unwrap();
    let mut names = [keys(&forced, ""), keys(&measured, "")].concat();
    names.push("responses".to_owned());
    assert_eq!(documented("Names of quantities"), names);
}
