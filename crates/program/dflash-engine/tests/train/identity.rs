//! Another model of the target's shape, at every place where one can enter: only its weights
//! differ, and it is refused by name.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use dflash_identity::TargetIdentity;
use dflash_test_support::eventually;

use crate::world::{Run, World, sorted_checkpoints};

/// A world with a second target that differs only in its weights.
struct Two {
    world: World,
    target: String,
    other: String,
}

impl Two {
    fn new() -> Self {
        let world = World::new();
        let path = |name: &str| world.path(name).to_string_lossy().into_owned();
        let (target, other) = (path("target"), path("other"));
        world.write_other_target("other");
        Self { world, target, other }
    }

    /// A target's identity as messages print it.
    fn named(&self, name: &str) -> String {
        TargetIdentity::read(&self.world.path(name), &self.world.path(name).to_string_lossy())
            .unwrap()
            .to_string()
    }

    /// Asserts that the run was refused with both targets named, and with `more`.
    fn assert_refused(&self, run: &Run, more: &str) {
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        for expected in [&self.named("target"), &self.named("other"), more] {
            assert!(run.stderr.contains(expected), "no {expected:?} in {}", run.stderr);
        }
    }

    /// Trains on a server's states, with `more`.
    fn train_from(&self, save: &str, endpoints: &str, more: &[&str]) -> Run {
        let flags = ["--vllm-endpoint", endpoints, "--on-missing", "generate"];
        let states = self.world.path("fetched").to_string_lossy().into_owned();
        let own = ["--hidden-states-path", states.as_str()];
        self.world.train(save, &[&flags[..], &own[..], more].concat())
    }

    fn serve(&self, target: &str) -> Server {
        Server::start(Path::new(target), &self.world.path(&format!("port-{}", unique())))
    }
}

fn unique() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A hidden-state server in its own process; killed when dropped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(target: &Path, port_file: &Path) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_dflash-engine"))
            .arg("hidden-server")
            .arg(target)
            .args(["--target-layer-ids", "1,2", "--dtype", "float32", "--port", "0"])
            .arg("--port-file")
            .arg(port_file)
            .env("OMP_NUM_THREADS", "1")
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually("the server is ready", || port_file.is_file());
        let port = std::fs::read_to_string(port_file).unwrap();
        Self { child, url: format!("http://127.0.0.1:{}/v1", port.trim()) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn another_model_behind_an_endpoint_is_refused_before_the_first_step() {
    let two = Two::new();
    let (right, wrong) = (two.serve(&two.target), two.serve(&two.other));
    let run = two.train_from("wrong", &wrong.url, &[]);
    two.assert_refused(&run, "start the server with the target's files");
    assert!(sorted_checkpoints(&two.world.path("wrong")).is_empty());
    // The wrong one of two servers is found in either position.
    for endpoints in [[&right.url, &wrong.url], [&wrong.url, &right.url]] {
        let joined = endpoints.map(String::as_str).join(",");
        let run = two.train_from("both", &joined, &[]);
        two.assert_refused(&run, wrong.url.trim_end_matches("/v1"));
    }
    let run = two.train_from("right", &right.url, &[]);
    assert!(run.success(), "{}", run.stderr);
    // Stored states do not excuse a server that is only asked for missing ones.
    let run = two.world.train("late", &["--vllm-endpoint", &wrong.url, "--on-missing", "generate"]);
    two.assert_refused(&run, wrong.url.trim_end_matches("/v1"));
}

#[test]
fn states_cached_from_another_model_are_refused() {
    let two = Two::new();
    let server = two.serve(&two.other);
    let other = ["--verifier-name-or-path", &two.other];
    let cache = ["--on-generate", "cache", "--epochs", "1"];
    let run = two.train_from("cached", &server.url, &[&other[..], &cache].concat());
    assert!(run.success(), "{}", run.stderr);
    drop(server);
    let states = two.world.path("fetched").to_string_lossy().into_owned();
    let run = two.world.train("out", &["--hidden-states-path", &states]);
    two.assert_refused(&run, "name another --hidden-states-path");
    assert!(sorted_checkpoints(&two.world.path("out")).is_empty());
    let run = two.world.train("again", &[&other[..], &["--hidden-states-path", &states]].concat());
    assert!(run.success(), "{}", run.stderr);
}

#[test]
fn a_run_goes_on_with_its_own_target_only() {
    let two = Two::new();
    let run = two.world.train("out", &["--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    let before = sorted_checkpoints(&two.world.path("out"));
    let other = ["--verifier-name-or-path", &two.other, "--resume"];
    let run = two.world.train("out", &other);
    two.assert_refused(&run, "cannot resume");
    assert!(run.stderr.contains("--from-pretrained"), "{}", run.stderr);
    assert_eq!(sorted_checkpoints(&two.world.path("out")), before);
    // The advice works, and states its consequences. The states are still those of the first
    // target, in a format too old to record that.
    let checkpoint = two.world.path("out").join(&before[0]).to_string_lossy().into_owned();
    let pretrained = ["--from-pretrained", &checkpoint, "--verifier-name-or-path", &two.other];
    let run = two.world.train("adapted", &[&pretrained[..], &["--epochs", "1"]].concat());
    assert!(run.success(), "{}", run.stderr);
    let note =
        format!("was made for {}: it has to adapt to {}", two.named("target"), two.named("other"));
    assert!(run.stderr.contains(&note), "no {note:?} in {}", run.stderr);
    let adapted = TargetIdentity::of_draft(Path::new(run.stdout.trim())).unwrap().unwrap();
    assert_eq!(adapted.to_string(), two.named("other"));
    // A copy elsewhere, under another name, is the same target.
    let copy = two.world.copy_target("target", "renamed");
    let own = ["--verifier-name-or-path", &copy, "--resume", "--epochs", "2"];
    let run = two.world.train("out", &[&own[..], &["--allow-changed", "epochs"]].concat());
    assert!(run.success(), "{}", run.stderr);
    // If the change is named explicitly, the run continues with another target.
    let leave = ["--epochs", "3", "--allow-changed", "epochs,target"];
    let run = two.world.train("out", &[&other[..], &leave].concat());
    assert!(run.success(), "{}", run.stderr);
    assert!(run.stderr.contains("changed: target config "), "{}", run.stderr);
}

#[test]
fn a_draft_is_measured_on_its_own_target_unless_told_otherwise() {
    let two = Two::new();
    let run = two.world.train("out", &["--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    let (draft, prompts) = (run.stdout.trim(), two.world.prompts("prompts.jsonl"));
    let eval = |target: &str, more: &[&str]| {
        let line = ["eval", "--target", target, "--draft", draft, "--prompts", &prompts];
        two.world.engine(&[&line[..], &["--max-new-tokens", "8"], more].concat())
    };
    let refused = eval(&two.other, &[]);
    two.assert_refused(&refused, "--allow-other-target");
    let allowed = eval(&two.other, &["--allow-other-target"]);
    assert!(
        allowed.success() && allowed.stderr.contains(&two.named("other")),
        "{}",
        allowed.stderr
    );
    let own = eval(&two.target, &[]);
    assert!(own.success(), "{}", own.stderr);
}

#[test]
fn data_of_another_tokenizer_is_refused_and_of_another_model_reported() {
    let two = Two::new();
    let write = |prepared_for: &dflash_data::PreparedFor| {
        let document = serde_json::json!({ "prepared_for": prepared_for }).to_string();
        std::fs::write(two.world.path("data/dflash_prepare.json"), document).unwrap();
    };
    let mut of_other = dflash_data::PreparedFor::of(&two.world.path("other"), &two.other).unwrap();
    write(&of_other);
    let run = two.world.train("reported", &["--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    let note = format!("the data was prepared for {}", two.named("other"));
    assert!(run.stderr.contains(&note), "no {note:?} in {}", run.stderr);
    of_other.tokenizer = Some("0123456789ab".into());
    write(&of_other);
    let run = two.world.train("refused", &["--epochs", "1"]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    for expected in ["other (tokenizer 0123456789ab)", "target (tokenizer ", "prepare the data"] {
        assert!(run.stderr.contains(expected), "no {expected:?} in {}", run.stderr);
    }
    assert!(!two.world.path("refused").exists());
}

#[test]
fn a_run_of_before_targets_were_compared_is_refused_as_a_run() {
    let world = World::new();
    let run = world.train("out", &["--epochs", "1", "--draft-vocab-size", "24"]);
    assert!(run.success(), "{}", run.stderr);
    let checkpoint = PathBuf::from(run.stdout.trim());
    let state = checkpoint.join("trainer/state.json");
    let mut document: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&state).unwrap()).unwrap();
    assert!(document["target"]["weights"].is_string(), "{document}");
    document["target"] = serde_json::Value::Null;
    std::fs::write(&state, document.to_string()).unwrap();
    world.write_wider_target("wider");
    let wider = world.path("wider").to_string_lossy().into_owned();
    let run = world
        .train("out", &["--verifier-name-or-path", &wider, "--resume", "--draft-vocab-size", "24"]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("cannot resume"), "{}", run.stderr);
    assert!(!run.stderr.contains("--from-pretrained"), "{}", run.stderr);
}
