//! `dflash push` as the user sees it, against a local Hub that the official client accepts.

#[path = "push/http.rs"]
mod http;
#[path = "push/hub_server.rs"]
mod hub_server;
#[path = "push/official_client.rs"]
mod official_client;
#[path = "push/refusals.rs"]
mod refusals;
#[path = "push/world.rs"]
mod world;

use std::process::Command;

use dflash_test_support::eventually;
use hub_server::{What, sha256};
use serde_json::json;
use world::{MODEL, REPO, World};

#[test]
fn a_push_is_one_commit_of_what_serving_needs() {
    let world = World::new();
    let pushed = world.push(&format!("run --repo {REPO} --license mit --base-model some/target"));
    let repository = world.hub.repository(MODEL).unwrap();
    let files = repository.files("main");
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(names, ["README.md", "config.json", "model.safetensors"]);
    assert_eq!(files["model.safetensors"].content, world.read("run/step-000010/model.safetensors"));
    assert_eq!(files["config.json"].content, world.read("run/step-000010/config.json"));
    assert!(files["model.safetensors"].large && !files["README.md"].large);
    assert_eq!(repository.summaries(), ["initial commit", "Upload the drafter of step 10"]);
    assert_eq!(pushed.stdout.trim(), format!("{}/{REPO}/commit/{:040x}", world.hub.address(), 2));
    assert!(!repository.private);
    let size = files["model.safetensors"].content.len();
    assert!(pushed.stderr.contains("uploaded "), "{}", pushed.stderr);
    assert!(size > 3 << 20);
    // The second time there is nothing to do, and nothing is sent.
    world.hub.requests();
    let again = world.push(&format!("run --repo {REPO} --license mit --base-model some/target"));
    assert_eq!(again.stdout.trim(), format!("{}/{REPO}", world.hub.address()));
    let requests = world.hub.requests();
    assert!(requests.iter().all(|it| !it.contains("storage") && !it.contains("/commit/")));
    assert_eq!(world.hub.repository(MODEL).unwrap().summaries().len(), 2);
    assert_eq!(world.hub.leaks(), Vec::<String>::new());
}

#[test]
fn the_card_tells_what_the_run_recorded_and_nothing_of_this_machine() {
    let world = World::new();
    world.push(&format!("run/latest --repo {REPO} --base-model some/target"));
    let card = world.pushed_card();
    for part in [
        "base_model: some/target\n",
        "datasets:\n- openai/gsm8k\n",
        "| test.jsonl | greedy | 12 | 900 | 3.250 | 3.500 | 100.0 | 150.0 | 1.50x | 12 of 12 |",
        "| lr | 0.0006 |",
        "| supervised tokens | 355994 |",
        "| dropped: empty | 3 |",
        "From `openai/gsm8k`, `mine.jsonl`;",
        "The checkpoint of step 10: 903 samples with 193188 tokens were trained on, 25600 blocks in all.",
        "--speculative-num-draft-tokens 8",
        "| parameters | 1572870 |",
        "| target layers read (0 is the embedding) | 2, 3, 5, 6 |",
    ] {
        assert!(card.contains(part), "{part} is not in\n{card}");
    }
    let here = world.path("").display().to_string();
    for private in [&here, "/home/", "secretuser", "10.1.2.3"] {
        assert!(!card.contains(private), "{private} is in\n{card}");
    }
}

#[test]
fn a_dry_run_shows_all_and_sends_nothing() {
    let world = World::new();
    let line = format!("run --repo {REPO} --private --dry-run --collection Drafters");
    let shown = world.run_without_token(&line);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    assert_eq!(world.hub.requests(), Vec::<String>::new());
    for name in ["config.json", "model.safetensors"] {
        let content = world.read(&format!("run/step-000010/{name}"));
        let line = format!("{:>14}  {}", content.len(), sha256(&content));
        let found = shown.stdout.lines().find(|it| it.starts_with(&line) && it.ends_with(name));
        let way = if name == "config.json" { "in the commit" } else { "to large-file storage" };
        assert!(found.is_some_and(|it| it.contains(way)), "{line}\n{}", shown.stdout);
    }
    assert!(shown.stdout.contains("me/drafter, private where it is new"), "{}", shown.stdout);
    // The displayed card is the uploaded one.
    let (_, card) = shown.stdout.split_once("README.md:\n\n").unwrap();
    world.push(&format!("run --repo {REPO} --private"));
    assert_eq!(card, world.pushed_card());
    let readme = format!("{:>14}  {}", card.len(), sha256(card.as_bytes()));
    assert!(shown.stdout.contains(&readme), "{}", shown.stdout);
    assert!(world.hub.repository(MODEL).unwrap().private);
}

#[test]
fn a_drafter_that_was_never_evaluated_takes_a_word() {
    let world = World::new();
    let line = format!("run --repo {REPO}");
    let reports = world.path("run/step-000010/evaluations.json");
    let report = std::fs::read(&reports).unwrap();
    std::fs::remove_file(&reports).unwrap();
    world.fails(&line, "was never evaluated; measure it with `dflash eval --target TARGET");
    assert_eq!(world.hub.requests(), Vec::<String>::new());
    // A report on the same prompts with other weights does not count.
    let other = String::from_utf8(report.clone()).unwrap().replace(&world.digest(), "0123456789ab");
    std::fs::write(world.path("other.json"), other).unwrap();
    let named = format!("{line} --evaluation");
    world.fails(&format!("{named} other.json"), "other.json is a report for other weights");
    let bare = String::from_utf8(report.clone()).unwrap().replace("draft_weights", "x");
    std::fs::write(world.path("bare.json"), bare).unwrap();
    world.fails(&format!("{named} bare.json"), "does not say which weights it is for");
    std::fs::write(world.path("text.json"), "hello").unwrap();
    world.fails(&format!("{named} text.json"), "text.json is not a report of `dflash eval`");
    assert_eq!(world.hub.requests(), Vec::<String>::new());
    world.push(&format!("{line} --allow-unevaluated"));
    assert!(world.pushed_card().contains("**Nothing.** This drafter was published without"));
    std::fs::write(world.path("report.json"), &report).unwrap();
    world.push(&format!("{named} report.json"));
    assert!(world.pushed_card().contains("| test.jsonl | greedy | 12 |"));
}

#[test]
fn large_files_go_in_parts_where_the_hub_wants_that() {
    let world = World::new();
    world.hub.send_in_parts(1 << 20);
    // Only a lost part is sent again.
    world.hub.mishap("PUT /storage", 1, What::Break(1000));
    world.push(&format!("run --repo {REPO}"));
    let files = world.hub.repository(MODEL).unwrap().files("main");
    assert_eq!(files["model.safetensors"].content, world.read("run/step-000010/model.safetensors"));
    let puts = world.hub.requests().iter().filter(|it| it.starts_with("PUT")).count();
    assert_eq!(puts, 4 + 1);
    assert_eq!(world.hub.leaks(), Vec::<String>::new());
}

#[test]
fn a_run_after_a_failure_goes_on_and_until_then_nothing_is_seen() {
    let world = World::new();
    world.write_gguf("drafter-f16.gguf", "dflash", 8);
    let line = format!("run --repo {REPO} --gguf drafter-f16.gguf");
    // The first large file arrives; the connection for the second breaks on every attempt.
    let second =
        format!("PUT /storage/{}", sha256(&world.read("run/step-000010/model.safetensors")));
    world.hub.mishap(String::leak(second), 99, What::Break(1 << 20));
    let failed = world.fails(&line, "the same command continues from here");
    assert!(failed.contains("nothing was published"), "{failed}");
    assert!(world.hub.repository(MODEL).unwrap().files("main").is_empty());
    let puts = |requests: &[String]| requests.iter().filter(|it| it.starts_with("PUT")).count();
    assert_eq!(puts(&world.hub.requests()), 1 + 4, "bounded");
    world.hub.heal();
    let done = world.push(&line);
    assert!(done.stderr.contains("were already there"), "{}", done.stderr);
    assert_eq!(puts(&world.hub.requests()), 1, "what arrived is not sent again");
    let files = world.hub.repository(MODEL).unwrap().files("main");
    assert_eq!(files["drafter-f16.gguf"].content, world.read("drafter-f16.gguf"));
    assert_eq!(files.len(), 4);
    assert!(world.pushed_card().contains("hf download me/drafter drafter-f16.gguf --local-dir ."));
}

#[test]
fn a_server_that_stumbles_is_asked_again() {
    let world = World::new();
    world.hub.mishap("PUT /storage", 2, What::Status(503, "slow down"));
    world.hub.mishap("POST /me/drafter.git", 1, What::Status(502, ""));
    world.hub.mishap("POST /api/models/me/drafter/commit", 1, What::Status(500, "oops"));
    world.push(&format!("run --repo {REPO}"));
    assert_eq!(world.hub.repository(MODEL).unwrap().files("main").len(), 3);
    assert_eq!(world.hub.repository(MODEL).unwrap().summaries().len(), 2);
}

#[test]
fn a_commit_whose_answer_is_lost_is_made_once() {
    let world = World::new();
    world.hub.mishap("POST /api/models/me/drafter/commit", 99, What::Lose);
    let pushed = world.push(&format!("run --repo {REPO}"));
    let repository = world.hub.repository(MODEL).unwrap();
    // The first one created the repository.
    assert_eq!(repository.summaries().len(), 2, "{:?}", repository.summaries());
    let page = format!("{}/{REPO}/commit/{:040x}", world.hub.address(), 2);
    assert_eq!(pushed.stdout.trim(), page);
    world.hub.heal();
    let again = world.push(&format!("run --repo {REPO}"));
    assert_eq!(again.stdout.trim(), format!("{}/{REPO}", world.hub.address()));
    assert!(again.stderr.contains("nothing was committed"), "{}", again.stderr);
    assert_eq!(world.hub.repository(MODEL).unwrap().files("main").len(), 3);
}

#[test]
fn a_pull_request_whose_answer_is_lost_is_opened_once() {
    let world = World::new();
    world.hub.mishap("POST /api/models/me/drafter/commit", 99, What::Lose);
    let line = format!("run --repo {REPO} --create-pr");
    let page = format!("{}/{REPO}/discussions/1", world.hub.address());
    // Another push does not open a second one.
    for _ in 0..2 {
        assert_eq!(world.push(&line).stdout.trim(), page);
        world.hub.heal();
    }
    assert_eq!(world.hub.repository(MODEL).unwrap().proposals().len(), 1);
    let other = world.push(&format!("{line} --message another"));
    assert_eq!(other.stdout.trim(), page.replace("discussions/1", "discussions/2"));
    // If the Hub cannot be asked, the outcome is unknown, and the request is not repeated.
    world.hub.mishap("POST /api/models/me/drafter/commit", 99, What::Lose);
    world.hub.mishap("GET /api/models/me/drafter/discussions", 99, What::Status(403, "no"));
    let failed = world.fails(&format!("{line} --message third"), "may have been made");
    assert!(!failed.contains("nothing was published"), "{failed}");
    assert_eq!(world.hub.repository(MODEL).unwrap().proposals().len(), 3);
}

#[test]
fn the_card_shows_the_results_that_are_chosen() {
    let world = World::new();
    let line = format!("run --repo {REPO}");
    let all = world.push(&line);
    assert!(all.stderr.contains("the card shows test.jsonl, greedy: 12 answers"), "{}", all.stderr);
    world.fails(
        &format!("{line} --results GSM8K"),
        "the results of this drafter are for test.jsonl",
    );
    world.push(&format!("{line} --results TEST.jsonl"));
    assert!(world.pushed_card().contains("| test.jsonl | greedy | 12 |"));
    world.push(&format!("{line} --results none"));
    assert!(!world.pushed_card().contains("test.jsonl |"));
}

#[test]
fn ctrl_c_in_an_upload_leaves_nothing_to_see() {
    let world = World::new();
    world.hub.mishap("PUT /storage", 1, What::Stall);
    let mut child = world.command(&format!("run --repo {REPO}")).spawn().unwrap();
    let mut seen = Vec::new();
    eventually("the upload begins", || {
        seen.extend(world.hub.requests());
        seen.iter().any(|it| it.starts_with("PUT"))
    });
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(interrupted.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(world.hub.repository(MODEL).unwrap().files("main").is_empty());
}

#[test]
fn a_collection_is_made_once_and_joined() {
    let world = World::new();
    let line = format!("run --repo {REPO} --collection");
    let pushed = world.command(&line).arg("My Drafters").output().unwrap();
    let pushed = String::from_utf8(pushed.stdout).unwrap();
    let page = format!("{}/collections/me/my-drafters-64f9", world.hub.address());
    assert_eq!(pushed.lines().nth(1), Some(page.as_str()), "{pushed}");
    let item = json!({"id": REPO, "type": "model"});
    assert_eq!(world.hub.collection("me/my-drafters-64f9")["items"], json!([item]));
    for _ in 0..2 {
        assert!(world.command(&line).arg("My Drafters").output().unwrap().status.success());
        world.push(&format!("{line} me/my-drafters-64f9"));
    }
    assert_eq!(world.hub.collection("me/my-drafters-64f9")["items"], json!([item]));
    let failed = world.fails(&format!("{line} me/gone-64f9"), "is published (");
    assert!(failed.contains("not in the collection me/gone-64f9"), "{failed}");
}

#[test]
fn a_branch_and_a_pull_request_leave_main_as_it_is() {
    let world = World::new();
    world.hub.add(MODEL, false);
    world.fails(&format!("run --repo {REPO} --revision v2"), "it has no branch v2; create it");
    world.hub.add_branch(MODEL, "v2");
    world.push(&format!("run --repo {REPO} --revision v2 --message two"));
    let proposed = world.push(&format!("run --repo {REPO} --create-pr"));
    assert_eq!(proposed.stdout.trim(), format!("{}/{REPO}/discussions/1", world.hub.address()));
    let repository = world.hub.repository(MODEL).unwrap();
    assert_eq!(repository.files("main").len(), 0);
    assert_eq!((repository.files("v2").len(), repository.files("refs/pr/1").len()), (3, 3));
    assert_eq!(repository.summaries()[1], "two");
}

#[test]
fn an_export_goes_as_it_is() {
    let world = World::new();
    world.write_gguf("drafter-q8_0.gguf", "dflash", 8);
    world.push(&format!("drafter-q8_0.gguf --repo {REPO} --allow-unevaluated"));
    let files = world.hub.repository(MODEL).unwrap().files("main");
    assert_eq!(files.keys().collect::<Vec<_>>(), ["README.md", "drafter-q8_0.gguf"]);
    let card = world.pushed_card();
    assert!(card.contains("library_name: gguf\n") && card.contains("- gguf\n"), "{card}");
    assert!(!card.contains("vllm serve"), "{card}");
    world.write_gguf("target.gguf", "qwen3", 8);
    world.fails(&format!("target.gguf --repo {REPO}"), "holds a model of architecture qwen3");
    world.write_gguf("other.gguf", "dflash", 16);
    let line = format!("run --repo {REPO} --gguf other.gguf");
    world.fails(&line, "its block size is 16, and 8 in config.json");
    world.fails(&format!("run/step-000010/trainer --repo {REPO}"), "is not a drafter: it has no");
    world.fails(&format!("nowhere --repo {REPO}"), "nowhere is not a drafter");
}
