//! TensorBoard reads our files, if its package is installed.

use std::process::Command;

use dflash_run::{
    Entry, Line, MetricLine, RunAbout, RunDir, StreamCounters, TeacherForced, Trackers,
};
use dflash_settings::Tracker;

fn line(step: u64) -> MetricLine {
    let figures = TeacherForced {
        loss: Some(8.0 / step as f64),
        accuracy: None,
        accuracy_by_slot: vec![None, Some(0.5)],
        expected_acceptance_length: Some(1.5),
        ..TeacherForced::default()
    };
    let stream = Some(StreamCounters { retries: step, ..StreamCounters::default() });
    MetricLine { step, figures, stream, ..MetricLine::default() }
}

#[test]
fn tensorboard_reads_our_events() {
    let reader = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tensorboard/read.py");
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::at(dir.path());
    let mut events = Trackers::open(&run, &[Tracker::Tensorboard], &RunAbout::default()).unwrap();
    let lines: Vec<MetricLine> = [1, 2, 4].map(line).into();
    lines.iter().for_each(|line| events.add(&Entry::of(line, 1.7e9)).unwrap());
    let python = |arguments: &[&str]| {
        let python = std::env::var("DFLASH_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        Command::new(python).args(arguments).output().ok().filter(|it| it.status.success())
    };
    if python(&["-c", "import tensorboard"]).is_none() {
        println!("skipped: python3 has no tensorboard to read our events with");
        return;
    }
    // A start that resumes after step 2 voids the later points.
    drop(events);
    let about = RunAbout { step: 2, ..RunAbout::default() };
    let mut events = Trackers::open(&run, &[Tracker::Tensorboard], &about).unwrap();
    let lines: Vec<MetricLine> = [1, 2, 3].map(line).into();
    events.add(&Entry::of(&lines[2], 1.7e9)).unwrap();
    let read = python(&[reader, run.path().join(RunDir::EVENTS).to_str().unwrap()]);
    let found: serde_json::Value = serde_json::from_slice(&read.unwrap().stdout).unwrap();
    let tags = lines[0].scalars();
    assert_eq!(found.as_object().unwrap().len(), tags.len(), "{found}");
    for (index, line) in lines.iter().enumerate() {
        for (tag, value) in line.scalars() {
            assert_eq!(found[&tag][index], serde_json::json!([line.step, value]), "{tag}");
            assert_eq!(found[&tag].as_array().unwrap().len(), lines.len(), "{tag}");
        }
    }
}
