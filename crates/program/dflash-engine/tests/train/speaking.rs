//! What a run reports: its summary, its lines, its directory's draft, and the trackers' files.

use std::path::Path;
use std::process::Command;

use dflash_data::{DatasetWriter, Sample, WriterOptions};
use serde_json::Value;

use crate::world::{World, sorted_checkpoints};

/// Two epochs of about eight rows in few steps.
const SHORT: [&str; 4] = ["--max-steps", "7", "--log-every", "5"];

fn steps(lines: &[Value]) -> Vec<u64> {
    lines.iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

#[test]
fn the_closing_words_say_what_happened() {
    let world = World::new();
    (0..6).for_each(|sample| std::fs::remove_file(world.stored(sample)).unwrap());
    let missing = ["--on-missing", "skip"];
    let run = world.train("out", &[&SHORT[..], &missing].concat());
    assert!(run.success(), "{}", run.stderr);
    let lines = world.lines("out", "metrics.jsonl");
    assert_eq!(steps(&lines), [1, 5, 7], "the first and the last too");
    assert_eq!(run.stderr.matches("slots/s").count(), 3, "{}", run.stderr);
    let last = lines.last().unwrap();
    let words: Vec<&str> =
        run.stderr.lines().skip_while(|line| !line.starts_with("done")).collect();
    assert!(words[0].starts_with("done: 7 of 7 steps, ") && words[0].ends_with(" s of training"));
    let loss = last["loss"].as_f64().unwrap();
    assert!(words[1].starts_with(&format!("  loss {loss:.4}, expected acceptance length ")));
    assert!(words[1].ends_with(" over the last 2 steps"), "{}", words[1]);
    let totals = ["samples", "tokens", "anchors"].map(|key| last[key].as_u64().unwrap());
    let [samples, tokens, anchors] = totals;
    let skipped = last["skipped_samples"].as_u64().unwrap();
    let expected = format!(
        "  {samples} samples, {tokens} tokens, {anchors} anchors; \
         {skipped} samples skipped, 0 bad steps"
    );
    assert_eq!(words[2], expected);
    assert!(skipped > 0 && samples > 6 && anchors >= samples, "{expected}");
    assert_eq!(words[3], format!("  checkpoint {}", run.stdout.trim()));
    assert_eq!(words.len(), 4, "{words:?}");
}

#[test]
fn lines_have_time_and_totals_that_outlive_a_restart() {
    let world = World::new();
    let began = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let whole = world.train("whole", &["--max-steps", "7"]);
    assert!(whole.success(), "{}", whole.stderr);
    let lines = world.lines("whole", "metrics.jsonl");
    let numbers = |key: &str| lines.iter().map(|line| line[key].as_f64().unwrap()).collect();
    for key in ["time", "elapsed_s", "samples", "tokens", "anchors"] {
        let found: Vec<f64> = numbers(key);
        assert!(found.is_sorted() && found[0] > 0.0 && found[0] < found[6], "{key}: {found:?}");
    }
    assert!(numbers("time")[0] > began.as_secs_f64());
    // the data's own counts: every sample once per epoch
    let all: Vec<u64> = (0..24).map(|sample| 12 + sample % 9).collect();
    let epoch = lines.iter().rev().find(|line| line["epoch"] == 1.0).expect("an epoch ends");
    assert_eq!(
        (&epoch["samples"], &epoch["tokens"]),
        (&24.into(), &all.iter().sum::<u64>().into())
    );
    for more in [&["--max-steps", "7", "--save-every", "3"][..], &["--max-steps", "7", "--resume"]]
    {
        let run = world.train("part", more);
        assert!(run.success(), "{}", run.stderr);
        if !more.contains(&"--resume") {
            for name in sorted_checkpoints(&world.path("part")).iter().skip(1) {
                std::fs::remove_dir_all(world.path("part").join(name)).unwrap();
            }
        } else {
            assert!(run.stderr.contains("done: 7 of 7 steps, 4 of them now, "), "{}", run.stderr);
        }
    }
    let (part, whole) = (world.lines("part", "metrics.jsonl"), lines);
    for (a, b) in part.iter().zip(&whole) {
        for key in ["step", "samples", "tokens", "anchors", "skipped_samples"] {
            assert_eq!(a[key], b[key], "{a} and {b}");
        }
    }
}

#[test]
fn a_run_s_directory_is_a_draft() {
    let world = World::new();
    let prompts = world.prompts("prompts.jsonl");
    let validation = ["--eval-every", "2", "--eval-prompts", &prompts, "--save-every", "1"];
    let more = [&["--max-steps", "5", "--eval-max-new-tokens", "8"][..], &validation].concat();
    let run = world.train("run", &more);
    assert!(run.success(), "{}", run.stderr);
    let out = world.path("run");
    let best: Value =
        serde_json::from_slice(&std::fs::read(out.join("best.json")).unwrap()).unwrap();
    let best = format!("step-{:06}", best["step"].as_u64().unwrap());
    let latest = sorted_checkpoints(&out).pop().unwrap();
    assert_eq!(latest, "step-000005");
    let weights = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    for (path, expected) in
        [(out.clone(), &best), (out.join("best"), &best), (out.join("latest"), &latest)]
    {
        assert_eq!(weights(&path), weights(&out.join(expected)), "{}", path.display());
        let evaluated = world.eval(&path)["draft"].as_str().unwrap().to_owned();
        assert!(evaluated.ends_with(expected.as_str()), "{evaluated}");
    }
    // loads it like an engine
    let (device, kind) = (tch::Device::Cpu, tch::Kind::Float);
    dflash_draft::Draft::load(&out, device, kind).unwrap();
    // Two names of one draft give the same start.
    let start = |save: &str, draft: &Path| {
        let draft = draft.to_str().unwrap();
        let run = world.train(save, &["--from-pretrained", draft, "--max-steps", "1"]);
        assert!(run.success(), "{}", run.stderr);
        assert!(run.stderr.contains("float32 weights"), "{}", run.stderr);
        weights(Path::new(run.stdout.trim()))
    };
    assert_eq!(start("from-run", &out), start("from-best", &out.join(&best)));
    let shape = ["plan", "--target", "target", "--rows", "9", "--mean-length", "9"];
    let mut plan = shape.map(str::to_owned).to_vec();
    plan[2] = world.path("target").display().to_string();
    plan.extend(["--from-pretrained".to_owned(), out.display().to_string()]);
    let plan: Vec<&str> = plan.iter().map(String::as_str).collect();
    let plan = world.engine(&plan);
    assert!(plan.success(), "{}", plan.stderr);
}

#[test]
fn without_prompts_the_best_is_told_by_held_out_rows() {
    let world = World::new();
    let rows = ["--validation-ratio", "0.25", "--eval-every", "2", "--max-steps", "5"];
    let run = world.train("out", &rows);
    assert!(run.success(), "{}", run.stderr);
    assert_eq!(run.stderr.matches(": validating on ").count(), 3, "{}", run.stderr);
    assert!(run.stderr.contains("step 4: validating on 2 held-out rows"), "{}", run.stderr);
    let best = std::fs::read(world.path("out").join("best.json")).unwrap();
    let best: Value = serde_json::from_slice(&best).unwrap();
    let saved = sorted_checkpoints(&world.path("out"));
    let lines = world.lines("out", "validation.jsonl");
    let is_saved =
        |line: &&Value| saved.contains(&format!("step-{:06}", line["step"].as_u64().unwrap()));
    let length = |line: &Value| line["expected_acceptance_length"].as_f64().unwrap();
    let highest = lines.iter().filter(is_saved).map(length).fold(0.0, f64::max);
    assert_eq!(best["expected_acceptance_length"].as_f64(), Some(highest));
    assert_eq!(best["acceptance_length"], Value::Null);
    let words = format!("  best expected acceptance length {highest:.3} at step {}", best["step"]);
    assert!(run.stderr.contains(&words), "{}", run.stderr);
    assert!(run.stderr.contains("  validation at step 5: loss "), "{}", run.stderr);
}

#[test]
fn an_evaluation_is_kept_beside_the_checkpoint_unless_that_is_not_wanted() {
    let world = World::new();
    let run = world.train("run", &["--max-steps", "1"]);
    assert!(run.success(), "{}", run.stderr);
    let checkpoint = run.stdout.trim();
    let names = || {
        let entries = std::fs::read_dir(checkpoint).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let (before, prompts) = (names(), world.prompts("prompts.jsonl"));
    let eval = |more: &[&str]| {
        let target = world.path("target").display().to_string();
        let own = ["eval", "--target", &target, "--draft", checkpoint, "--prompts", &prompts];
        let run = world.engine(&[&own[..], &["--max-new-tokens", "8"], more].concat());
        assert!(run.success(), "{}", run.stderr);
        run.stderr
    };
    assert!(!eval(&["--no-record"]).contains(checkpoint));
    assert_eq!(names(), before, "nothing is written");
    assert!(eval(&[]).contains(checkpoint), "it says where it wrote");
    assert_ne!(names(), before);
}

#[test]
fn a_validation_set_of_its_own_takes_nothing_from_the_data() {
    let world = World::new();
    let rows = |count: usize| {
        let path = world.path(&format!("set-{count}"));
        let mut writer = DatasetWriter::create(&path, WriterOptions::default()).unwrap();
        for row in 0..count as i64 {
            let input_ids = (0..20).map(|t| (row * 13 + t) % 60).collect();
            writer.push(&Sample { input_ids, loss_mask: vec![true; 20] }).unwrap();
        }
        writer.finish().unwrap();
        path.display().to_string()
    };
    let set = rows(5);
    let steps = ["--colocate", "--max-steps", "7"];
    let own = [&steps[..], &["--eval-every", "3", "--validation-data", &set]].concat();
    let run = world.train("own", &own);
    assert!(run.success(), "{}", run.stderr);
    assert!(run.stderr.contains("step 3: validating on 2 held-out rows"), "{}", run.stderr);
    let plain = world.train("plain", &steps);
    assert!(plain.success(), "{}", plain.stderr);
    let losses = |save: &str| crate::losses(&world.path(save));
    assert_eq!(losses("own"), losses("plain"), "all of the data is trained on");
    assert_eq!(world.lines("own", "validation.jsonl").len(), 3);
    // Another set measures something else, which is reported, and trains the same.
    let other = rows(3);
    let changed = [&own[..5], &["--validation-data", &other, "--resume"]].concat();
    let resumed = world.train("own", &changed);
    assert!(resumed.success(), "{}", resumed.stderr);
    let both = [&own[..], &["--validation-ratio", "0.2"]].concat();
    let refused = world.train("both", &both);
    assert!(refused.stderr.contains("--validation-data is a set of its own"), "{}", refused.stderr);
}

#[test]
fn epochs_are_not_saved_where_that_is_not_wanted() {
    let world = World::new();
    let run = world.train("out", &["--no-epoch-checkpoints", "--epochs", "3"]);
    assert!(run.success(), "{}", run.stderr);
    let saved = sorted_checkpoints(&world.path("out"));
    assert_eq!(saved.len(), 1);
    assert!(run.stdout.trim().ends_with(&saved[0]));
    assert_eq!(run.stderr.matches("saved ").count(), 1, "{}", run.stderr);
}

#[test]
fn trackers_get_every_line_and_the_run_s_name() {
    let world = World::new();
    let all = ["--log-to", "tensorboard,mlflow,wandb", "--run-name", "my run"];
    let more = ["--validation-ratio", "0.25", "--eval-every", "5"];
    let run = world.train("out", &[&SHORT[..], &all, &more].concat());
    assert!(run.success(), "{}", run.stderr);
    let experiment = world.path("out").join("mlruns/0");
    let entries = std::fs::read_dir(&experiment).unwrap().map(|entry| entry.unwrap().path());
    let stored = entries.into_iter().find(|path| path.is_dir()).unwrap();
    let meta = std::fs::read_to_string(stored.join("meta.yaml")).unwrap();
    assert!(meta.contains("run_name: \"my run\"\n") && meta.contains("status: 3\n"), "{meta}");
    assert_eq!(std::fs::read_to_string(stored.join("params/lr")).unwrap(), "0.01");
    let points = |tag: &str| std::fs::read_to_string(stored.join("metrics").join(tag)).unwrap();
    for (tag, file) in [("train", "metrics.jsonl"), ("validation", "validation.jsonl")] {
        let lines = world.lines("out", file);
        let expected: Vec<(f64, u64)> = lines
            .iter()
            .map(|line| (line["loss"].as_f64().unwrap(), line["step"].as_u64().unwrap()))
            .collect();
        let text = points(&format!("{tag}/loss"));
        let found: Vec<(f64, u64)> = text
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .map(|parts| (parts[1].parse().unwrap(), parts[2].parse().unwrap()))
            .collect();
        assert_eq!(found, expected, "{tag}");
    }
    let count = |name: &str| std::fs::read_dir(world.path("out").join(name)).unwrap().count();
    assert_eq!((count("wandb"), count("tensorboard")), (1, 1));
    read_by_mlflow(&experiment);
    let none = world.train("none", &[&SHORT[..], &["--log-to", "none"]].concat());
    assert!(none.success(), "{}", none.stderr);
    for name in ["tensorboard", "mlruns", "wandb"] {
        assert!(!world.path("none").join(name).exists(), "{name}");
    }
}

/// Files below `dir` that contain `text`.
fn files_with(dir: &Path, text: &str) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| match path.is_dir() {
            true => files_with(&path, text),
            false => {
                let bytes = std::fs::read(&path).unwrap();
                let has = bytes.windows(text.len()).any(|window| window == text.as_bytes());
                has.then_some(path).into_iter().collect()
            }
        })
        .collect()
}

#[test]
fn no_file_of_a_run_holds_an_endpoint_s_password() {
    let world = World::new();
    for (save, endpoint) in
        [("url", "http://me:s3cr3tpw@127.0.0.1:9/v1"), ("bare", "me:s3cr3tpw@h:9")]
    {
        let more = ["--endpoint", endpoint, "--log-to", "tensorboard,mlflow,wandb"];
        let run = world.train(save, &[&SHORT[..], &more].concat());
        assert!(run.success(), "{}", run.stderr);
        assert_eq!(files_with(&world.path(save), "s3cr3tpw"), Vec::<std::path::PathBuf>::new());
        assert!(!run.stderr.contains("s3cr3tpw"), "{}", run.stderr);
        let named = files_with(&world.path(save), "***@");
        assert!(named.iter().any(|path| path.ends_with("run.json")), "{named:?}");
        assert!(named.iter().any(|path| path.ends_with("params/vllm_endpoint")), "{named:?}");
    }
}

/// MLflow's own client finds the run, if it is installed.
fn read_by_mlflow(experiment: &Path) {
    let reader =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../train/dflash-run/tests/trackers/mlflow_run.py");
    let python = std::env::var("DFLASH_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(&python);
    let found = command.args(["-c", "import mlflow"]).output();
    if !found.is_ok_and(|it| it.status.success()) {
        println!("skipped: {python} has no mlflow to read our runs with; set DFLASH_PYTHON");
        return;
    }
    let store = experiment.parent().unwrap();
    let read = Command::new(&python).arg(reader).arg(store).output().unwrap();
    let text = String::from_utf8_lossy(&read.stderr).into_owned();
    let found: Value = serde_json::from_slice(&read.stdout).expect(&text);
    assert_eq!((&found["name"], &found["status"]), (&"my run".into(), &"FINISHED".into()));
    assert_eq!(found["params"]["lr"], "0.01");
    let steps = |tag: &str| -> Vec<u64> {
        let points = found["metrics"][tag].as_array().unwrap().iter();
        points.map(|point| point[0].as_u64().unwrap()).collect()
    };
    assert_eq!((steps("train/loss"), steps("validation/loss")), (vec![1, 5, 7], vec![5, 7]));
}
