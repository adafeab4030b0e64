//! Runs at limits: numbers at the ends of their ranges, more ranks than the machine can run, a full
//! disk, a terminal; and plans for whole command lines.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::running::PATIENCE;
use crate::world::{Run, World, sorted_checkpoints};

#[test]
fn numbers_at_the_ends_of_their_ranges_train_or_are_refused() {
    let world = World::new();
    let check = |flags: &[&str]| {
        let begun = Instant::now();
        let run = world.train("out", &[&["--epochs", "1", "--max-steps", "1"], flags].concat());
        assert!(matches!(run.code, Some(0 | 1)), "{flags:?}: {}", run.stderr);
        assert!(!run.stderr.contains("internal error"), "{flags:?}: {}", run.stderr);
        assert!(begun.elapsed() < PATIENCE, "{flags:?}");
        let _ = std::fs::remove_dir_all(world.path("out"));
        run
    };
    let trains = |flags: &[&str]| {
        let run = check(flags);
        assert!(run.success(), "{flags:?}: {}", run.stderr);
    };
    trains(&["--seed", "18446744073709551615"]);
    trains(&["--total-seq-len", "16777216", "--max-anchors", "16777216"]);
    trains(&["--anchors-per-sequence", "16777216"]);
    trains(&["--max-in-flight", "4096", "--window-mib", "1048576"]);
    trains(&["--loss-chunk-mib", "1048576", "--block-size", "1024"]);
    trains(&["--num-layers", "128"]);
    trains(&["--adam-betas", "0,0", "--dpace-alpha", "0", "--warmup", "0.9999"]);
    trains(&["--scheduler-type", "wsd", "--decay-ratio", "0", "--warmup-steps", "0"]);
    trains(&["--collective-timeout", "1000000", "--join-timeout", "1000000", "--nproc", "2"]);
    trains(&["--max-grad-norm", "1e20", "--gamma", "1e6", "--log-every", "1000000000"]);
    check(&["--lr", "1e12", "--allow-any-lr"]);
    check(&["--draft-vocab-size", "16777216"]);
    check(&["--mask-token-id", "16777215"]);
}

#[test]
fn more_ranks_than_the_machine_can_run_are_refused_before_they_start() {
    let world = World::new();
    let run = world.train("out", &["--nproc", "1000"]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("--nproc is 1000, expected 1 to "), "{}", run.stderr);
    assert!(!run.stderr.contains("[rank "), "{}", run.stderr);
}

#[test]
fn a_plan_takes_the_whole_line_of_a_training() {
    let world = World::new();
    let more = ["--nproc", "2", "--max-restarts", "1", "--save-every", "3", "--resume", "--json"];
    let mut line = world.arguments("out", &more);
    line[0] = "plan".to_owned();
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let run = world.engine(&line);
    assert!(run.success(), "{}", run.stderr);
    let plan: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(plan["ranks"], 2);
    let two = [&line[..], &["--nnodes", "3", "--node-rank", "1"]].concat();
    let plan: serde_json::Value = serde_json::from_str(&world.engine(&two).stdout).unwrap();
    assert_eq!(plan["ranks"], 6);
    let steps = plan["steps"].as_u64().unwrap();
    assert!(steps > 0 && !world.path("out").exists());
}

/// A small separate disk; unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    /// `None`, with a counted message, if mounting is not permitted.
    fn new(path: &Path, bytes: u64) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(path);
        match mount.output() {
            Ok(output) if output.status.success() => Some(Self(path.into())),
            _ => {
                println!("skipped: no file systems can be mounted here");
                None
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn bytes_in(path: &Path) -> u64 {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| if path.is_dir() { bytes_in(&path) } else { path.metadata().unwrap().len() })
        .sum()
}

#[test]
fn a_full_disk_is_freed_of_what_keep_last_would_remove() {
    let world = World::new();
    let steps = ["--epochs", "4", "--save-every", "2", "--keep-last", "2", "--nproc", "2"];
    let roomy = world.train("roomy", &steps);
    assert!(roomy.success(), "{}", roomy.stderr);
    let kept = sorted_checkpoints(&world.path("roomy"));
    assert_eq!(kept.len(), 2);
    let one = bytes_in(&world.path("roomy").join(&kept[0]));
    let Some(_disk) = Disk::new(&world.path("disk"), one * 5 / 2 + (64 << 10)) else { return };
    let tight = world.train("disk/run", &steps);
    assert!(tight.success(), "{}", tight.stderr);
    assert!(
        tight.stderr.contains("the disk is full; the checkpoints of steps "),
        "{}",
        tight.stderr
    );
    let last = kept.last().unwrap();
    assert_eq!(sorted_checkpoints(&world.path("disk/run")).last(), Some(last));
    assert_eq!(world.state("disk/run", last), world.state("roomy", last));
    // Without --keep-last nothing may be removed.
    std::fs::remove_dir_all(world.path("disk/run")).unwrap();
    let all = ["--epochs", "4", "--save-every", "2", "--nproc", "2"];
    let full = world.train("disk/run", &all);
    assert_eq!(full.code, Some(1), "{}", full.stderr);
    assert!(full.stderr.contains("free some space"), "{}", full.stderr);
    assert_eq!(sorted_checkpoints(&world.path("disk/run")).len(), 2, "{}", full.stderr);
}

#[test]
fn on_a_terminal_the_checkpoint_s_path_has_a_line_of_its_own() {
    let world = World::new();
    let mut line = world.arguments("out", &["--max-steps", "2"]);
    line.retain(|word| word != "--no-progress");
    let command = format!("{} {}", env!("CARGO_BIN_EXE_dflash-engine"), line.join(" "));
    // `script` provides a terminal and records its output.
    let log = world.path("typescript");
    let mut script = Command::new("script");
    script.args(["-qec", &command]).arg(&log).env("OMP_NUM_THREADS", "1").env("TERM", "xterm");
    match script.stdin(std::process::Stdio::null()).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout))
        }
        Err(error) => {
            println!("skipped: no program `script` here ({error})");
            return;
        }
    }
    let shown = String::from_utf8_lossy(&std::fs::read(&log).unwrap()).into_owned();
    let path = format!("{}", world.path("out").join("step-000002").display());
    let is_path = |line: &str| line.trim_end_matches('\r') == path;
    assert!(shown.split('\n').any(is_path), "{shown:?}");
    assert!(shown.contains("2/2 steps"), "{shown:?}");
}

#[test]
fn reports_name_devices_as_flags_do() {
    let world = World::new();
    let run: Run = world.train("out", &["--max-steps", "1"]);
    assert!(run.success(), "{}", run.stderr);
    let report = world.eval(Path::new(run.stdout.trim()));
    assert!(report["device"].as_str().unwrap().starts_with("cpu ("), "{report}");
    let target = world.path("target").to_string_lossy().into_owned();
    let bench = ["bench", "train-step", "--json", "--target", &target, "--device", "cpu"];
    let small =
        ["--tokens", "64", "--docs", "2", "--anchors", "4", "--block", "4", "--layers", "1"];
    let bench = |more: &[&str]| -> serde_json::Value {
        let small = [&small[..], &["--aux-layers", "2", "--steps", "1"], more].concat();
        let bench = world.engine(&[&bench[..], &small].concat());
        assert!(bench.success(), "{}", bench.stderr);
        serde_json::from_str(&bench.stdout).unwrap()
    };
    let usual = bench(&[]);
    assert_eq!((&usual["device"], &usual["loss_chunk_mib"]), (&"cpu".into(), &8.into()));
    assert_eq!(bench(&["--loss-chunk-mib", "1"])["loss_chunk_mib"], 1);
}
