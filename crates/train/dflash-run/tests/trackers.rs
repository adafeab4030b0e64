//! The trackers' own readers read our files, if their packages are installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use dflash_run::{End, Entry, MetricLine, RunAbout, RunDir, TeacherForced, Trackers};
use dflash_settings::Tracker;
use serde_json::{Value, json};

fn python() -> String {
    std::env::var("DFLASH_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// Whether Python can run this; prints a note if not.
fn can(statement: &str) -> bool {
    let tried = Command::new(python()).args(["-c", statement]).output();
    let can = tried.is_ok_and(|it| it.status.success());
    if !can {
        println!("skipped: {} cannot '{statement}'; set DFLASH_PYTHON", python());
    }
    can
}

fn read(script: &str, path: &Path) -> String {
    let script = format!("{}/tests/trackers/{script}", env!("CARGO_MANIFEST_DIR"));
    let read = Command::new(python()).arg(script).arg(path).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    String::from_utf8(read.stdout).unwrap()
}

fn line(step: u64) -> Entry {
    let figures = TeacherForced { loss: Some(8.0 / step as f64), ..TeacherForced::default() };
    Entry::of(&MetricLine { step, figures, ..MetricLine::default() }, 1.7e9 + step as f64)
}

fn write(dir: &Path, tracker: Tracker, step: u64, end: End) {
    let config = json!({"lr": 0.1, "loss": ["ce"], "note": "a".repeat(70_000)});
    let about = RunAbout { name: "a: 'run' é".to_owned(), config, step };
    let mut trackers = Trackers::open(&RunDir::at(dir), &[tracker], &about).unwrap();
    (step + 1..step + 300).for_each(|step| trackers.add(&line(step)).unwrap());
    trackers.close(end).unwrap();
}

#[test]
fn mlflow_reads_our_runs() {
    if !can("import mlflow") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Tracker::Mlflow, 0, End::Stopped);
    // resumes the same run and repeats a hundred steps
    write(dir.path(), Tracker::Mlflow, 199, End::Finished);
    let found: Value =
        serde_json::from_str(&read("mlflow_run.py", &dir.path().join("mlruns"))).unwrap();
    assert_eq!((&found["name"], &found["status"]), (&"a: 'run' é".into(), &"FINISHED".into()));
    assert_eq!(
        (&found["params"]["lr"], &found["params"]["loss"]),
        (&"0.1".into(), &"[\"ce\"]".into())
    );
    let points = found["metrics"]["train/loss"].as_array().unwrap();
    assert_eq!(points.len(), 498);
    for (step, point) in (1..).zip(points) {
        assert_eq!(
            (&point[0], &point[2]),
            (&json!(step), &json!(1_700_000_000_000_u64 + 1000 * step))
        );
        let expected = 8.0 / step as f64;
        assert!((point[1].as_f64().unwrap() - expected).abs() < 1e-12, "{point}");
    }
}

#[test]
fn wandb_reads_our_logs() {
    if !can("from wandb.sdk.internal.datastore import DataStore") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Tracker::Wandb, 0, End::Finished);
    let only = |dir: &Path| -> PathBuf {
        let mut entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        entries.find(|path| path.file_name() != Some("files".as_ref())).unwrap()
    };
    let log = only(&only(&dir.path().join("wandb")));
    let text = read("wandb_run.py", &log);
    let records: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), 2 + 299 + 2);
    let run = &records[1]["run"];
    assert_eq!((&run["display_name"], &run["project"]), (&"a: 'run' é".into(), &"dflash".into()));
    assert_eq!(run["config"]["update"][0], json!({"key": "lr", "value_json": "0.1"}));
    for (step, record) in (1..).zip(&records[2..301]) {
        assert_eq!(record["history"]["step"]["num"], step.to_string());
        let items = record["history"]["item"].as_array().unwrap();
        let loss = items.iter().find(|item| item["key"] == "train/loss").unwrap();
        assert_eq!(loss["value_json"], json!(8.0 / f64::from(step)).to_string());
    }
    assert!(records[301].get("summary").is_some() && records[302].get("exit").is_some());
}
