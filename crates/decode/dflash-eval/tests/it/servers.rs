//! The same figures from every kind of server, by its own counters or timings.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dflash_eval::endpoint::evaluate;
use dflash_eval::{Error, EvalReport, Measured};
use dflash_settings::{EvalSettings, Thinking};

use crate::fake_server::{FakeServer, Manners, TOKENS};

const PACE: Duration = Duration::from_millis(2);
const ROWS: &str =
    "{\"question\": \"one\"}\n{\"turns\": [\"two\", \"three\"]}\n{\"prompt\": \"four\"}\n";

struct ServerDir {
    dir: tempfile::TempDir,
}

impl ServerDir {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn prompts(&self, text: &str) -> PathBuf {
        let path = self.dir.path().join("prompts.jsonl");
        std::fs::write(&path, text).unwrap();
        path
    }

    fn settings(&self, server: &FakeServer) -> EvalSettings {
        EvalSettings {
            endpoint: Some(server.url.clone()),
            prompts: vec![self.prompts(ROWS).display().to_string()],
            max_new_tokens: 32,
            ..EvalSettings::default()
        }
    }
}

fn run(settings: &EvalSettings) -> Result<EvalReport, Error> {
    evaluate(settings, &AtomicBool::new(false))
}

/// The one result with this draft.
fn of<'a>(report: &'a EvalReport, draft: &str) -> &'a Measured {
    let found: Vec<&Measured> = report.results.iter().filter(|one| one.draft == draft).collect();
    assert_eq!(found.len(), 1, "{draft}");
    found[0]
}

#[test]
fn vllm_tells_tau_by_response_and_by_position() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let report = run(&place.settings(&server)).unwrap();
    let measured = of(&report, "vllm");
    assert_eq!((measured.responses, measured.tokens), (4, 4 * TOKENS));
    let figures = &measured.figures;
    assert_eq!(figures.acceptance_length, Some(2.5));
    assert_eq!(figures.acceptance_length_per_response, Some(2.5));
    assert_eq!(figures.acceptance_by_slot, [None, Some(0.75), Some(0.5), Some(0.25)]);
    // Each of five pieces takes at least two milliseconds.
    let first = figures.time_to_first_token_s.unwrap();
    assert!((0.002..0.5).contains(&first), "{first}");
    let speed = figures.tokens_per_second.unwrap();
    assert!(speed <= TOKENS as f64 / 0.01, "{speed}");
    assert_eq!((figures.speed_up, report.steps), (None, 16));
    assert!(measured.answers.iter().all(|answer| answer.prompt_tokens == 7));
    let text = report.to_string();
    for line in ["(vllm)", "per step           2.500   16 steps", "per response       2.500"] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    // The second turn follows the answer to the first.
    let bodies = server.bodies();
    let last = bodies.iter().find(|body| body["messages"].as_array().unwrap().len() == 3).unwrap();
    assert_eq!(last["messages"][1]["role"], "assistant");
    assert_eq!(last["messages"][2]["content"], "three");
    assert!(last["chat_template_kwargs"].is_null() && last["top_p"].is_null());
}

#[test]
fn sglang_and_llama_cpp_tell_tau_in_their_own_ways() {
    for (manners, kind) in [
        (Manners::Sglang, "sglang"),
        (Manners::LlamaCpp, "llamacpp"),
        (Manners::LlamaCppWithoutMetrics, "llamacpp"),
    ] {
        let (place, server) = (ServerDir::new(), FakeServer::start(manners, PACE));
        let report = run(&place.settings(&server)).unwrap();
        let figures = &of(&report, kind).figures;
        assert_eq!(figures.acceptance_length, Some(2.5), "{manners:?}");
        assert_eq!(figures.acceptance_length_per_response, Some(2.5), "{manners:?}");
        assert!(figures.acceptance_by_slot.is_empty());
    }
}

#[test]
fn several_at_a_time_are_counted_together() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let rows = "{\"question\": \"q\"}\n".repeat(12);
    let prompts = vec![place.prompts(&rows).display().to_string()];
    let settings = EvalSettings { prompts, concurrency: vec![4], ..place.settings(&server) };
    place.prompts(&rows);
    let report = run(&settings).unwrap();
    let measured = of(&report, "vllm");
    assert!((2..=4).contains(&server.most_at_once()), "{}", server.most_at_once());
    assert_eq!(measured.whole.verification.as_ref().unwrap().steps, 48);
    assert_eq!(measured.figures.acceptance_length, Some(2.5));
    assert_eq!(measured.figures.acceptance_length_per_response, None);
    let seconds = measured.whole.seconds.unwrap();
    let expect = 12.0 * TOKENS as f64 / seconds;
    assert!((measured.figures.tokens_per_second.unwrap() / expect - 1.0).abs() < 1e-9);
}

#[test]
fn a_plain_server_gives_the_speed_up() {
    let place = ServerDir::new();
    let pace = Duration::from_millis(8);
    let (fast, slow) =
        (FakeServer::start(Manners::Vllm, pace), FakeServer::start(Manners::Plain, pace));
    let settings = EvalSettings { plain_endpoint: Some(slow.url.clone()), ..place.settings(&fast) };
    let report = run(&settings).unwrap();
    assert_eq!(of(&report, "none").figures.acceptance_length, None);
    // Ten steps against four.
    let speed_up = of(&report, "vllm").table_speed_up().unwrap();
    assert!((1.5..4.0).contains(&speed_up), "{speed_up}");
}

#[test]
fn two_servers_take_turns_and_their_speed_up_has_an_error() {
    let (place, fast) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let slow = FakeServer::start(Manners::Plain, PACE);
    let plain_endpoint = Some(slow.url.clone());
    let settings = EvalSettings { plain_endpoint, concurrency: vec![2], ..place.settings(&fast) };
    place.prompts(&"{\"question\": \"q\"}\n".repeat(16));
    let report = run(&settings).unwrap();
    let (plain, drafted) = (of(&report, "none"), of(&report, "vllm"));
    assert_eq!((plain.whole.parts.len(), drafted.whole.parts.len()), (4, 4));
    assert!(drafted.whole.parts.iter().all(|part| part.tokens == 4 * TOKENS));
    assert_eq!(drafted.whole.verification.as_ref().unwrap().steps, 16 * 4);
    assert!(drafted.noise["speed_up"] > 0.0, "{:?}", drafted.noise);
    // Order of requests: warm-up of both, then plain, fast; fast, plain; plain, fast; fast, plain.
    let asked = |server: &FakeServer, name| server.arrivals().into_iter().map(move |at| (at, name));
    let mut asked: Vec<_> = asked(&slow, "plain").chain(asked(&fast, "fast")).collect();
    asked.sort();
    let mut turns: Vec<&str> = asked.into_iter().map(|(_, name)| name).collect();
    turns.dedup();
    assert_eq!(turns, ["plain", "fast", "plain", "fast", "plain", "fast", "plain"]);
}

#[test]
fn ways_reach_the_server() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let settings = EvalSettings {
        temperature: vec![0.0, 1.0],
        thinking: vec![Thinking::On, Thinking::Off],
        first_turn: true,
        limit: Some(2),
        seed: 7,
        ..place.settings(&server)
    };
    let report = run(&settings).unwrap();
    assert_eq!(report.results.len(), 4);
    assert!(report.results.iter().all(|one| one.responses == 2));
    let bodies = server.bodies();
    for (temperature, thinking) in [(0.0, true), (0.0, false), (1.0, true), (1.0, false)] {
        let asked = bodies.iter().filter(|body| {
            body["temperature"] == temperature
                && body["chat_template_kwargs"]["enable_thinking"] == thinking
        });
        let asked: Vec<_> = asked.collect();
        assert_eq!(asked.len(), 3, "two questions and a warm-up");
        let sampled = temperature > 0.0;
        assert!(asked.iter().all(|body| body["seed"].is_null() != sampled));
    }
}

#[test]
fn what_is_too_long_is_skipped_and_what_breaks_off_is_an_error() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let with = |rows: &str| {
        let prompts = vec![place.prompts(rows).display().to_string()];
        let settings = place.settings(&server);
        place.prompts(rows);
        run(&EvalSettings { prompts, ..settings })
    };
    let report = with("{\"question\": \"too long\"}\n{\"question\": \"q\"}\n").unwrap();
    assert_eq!((report.responses, report.skipped), (1, 1));
    let error = with("{\"question\": \"too long\"}\n").unwrap_err().to_string();
    assert!(error.contains("leaves room"), "{error}");
    let error = with("{\"question\": \"break off\"}\n").unwrap_err().to_string();
    assert!(error.contains("broke off before its end"), "{error}");
    let error = with("{\"input_ids\": [1, 2], \"loss_mask\": [0, 1]}\n").unwrap_err().to_string();
    assert!(error.contains("prompts.jsonl:1: a row of token ids"), "{error}");
}

#[test]
fn servers_that_are_none_are_named() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let at = |url: &str| {
        let settings = EvalSettings { endpoint: Some(url.into()), ..place.settings(&server) };
        run(&settings).unwrap_err().to_string()
    };
    let nobody = at("http://me:secret@127.0.0.1:1/v1");
    assert!(nobody.contains("cannot be reached") && !nobody.contains("secret"), "{nobody}");
    assert!(at("http://").contains("not the address of a server"));
    let elsewhere = at(&format!("{}/other", server.url.trim_end_matches("/v1")));
    assert!(elsewhere.contains("answered 404"), "{elsewhere}");
    let stopped = evaluate(&place.settings(&server), &AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
}

#[test]
fn a_server_that_stumbles_is_asked_again() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    server.stumble("four", 2);
    let report = run(&place.settings(&server)).unwrap();
    assert_eq!((report.responses, report.sets[0].failed), (4, 0));
    // Counts of other answers are not attributed to this one.
    assert_eq!(of(&report, "vllm").figures.acceptance_length, Some(2.5));
}

#[test]
fn what_was_answered_is_reported_and_what_was_not_is_counted() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    server.stumble("three", 99);
    let report = run(&place.settings(&server)).unwrap();
    // The first turn of its row, and the other two rows.
    assert_eq!((report.responses, report.sets[0].failed), (3, 1));
    assert_eq!(of(&report, "vllm").figures.acceptance_length, Some(2.5));
    let text = report.to_string();
    assert!(text.contains("3 rows; 0 skipped; 1 FAILED"), "{text}");
}

#[test]
fn counters_that_start_anew_tell_nothing_of_that_answer() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    // One for the warm-up, and two of four.
    server.restart_after(3);
    let report = run(&place.settings(&server)).unwrap();
    let measured = of(&report, "vllm");
    let known = measured.answers.iter().filter(|answer| answer.verification.is_some()).count();
    assert_eq!((measured.responses, known, report.steps), (4, 3, 12));
    assert_eq!(measured.figures.acceptance_length, Some(2.5));
}

#[test]
fn what_was_not_measured_has_no_number() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Plain, PACE));
    let report = run(&place.settings(&server)).unwrap();
    let json = serde_json::to_value(&report).unwrap();
    for key in ["acceptance_length", "acceptance_length_per_response"] {
        assert!(json[key].is_null(), "{key} is {}", json[key]);
    }
    let text = report.to_string();
    assert!(text.contains("per step               -   no step was counted"), "{text}");
    assert!(!text.contains("1.000") && !text.contains("-0.0"), "{text}");
}

/// Settings for two sets of the rows of [`ROWS`], `first` and `second`.
fn two_sets(place: &ServerDir, server: &FakeServer) -> EvalSettings {
    let settings = place.settings(server);
    let file = &settings.prompts[0];
    EvalSettings { prompts: vec![format!("first={file}"), format!("second={file}")], ..settings }
}

fn answered(report: &EvalReport) -> Vec<(&str, usize, usize)> {
    report.results.iter().map(|one| (one.set.as_str(), one.responses, one.failed)).collect()
}

#[test]
fn one_stumble_anywhere_loses_nothing() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    server.stumble_at("/v1/models", 1);
    server.stumble_at("/metrics", 1);
    server.stumble("Count from one to ten", 1);
    let report = run(&two_sets(&place, &server)).unwrap();
    assert_eq!(answered(&report), [("first", 4, 0), ("second", 4, 0)]);
    assert!(report.results.iter().all(|one| one.figures.acceptance_length == Some(2.5)));
}

#[test]
fn a_warm_up_that_always_fails_does_not_keep_the_questions_from_being_asked() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    server.stumble("Count from one to ten", 99);
    let report = run(&two_sets(&place, &server)).unwrap();
    assert_eq!(answered(&report), [("first", 4, 0), ("second", 4, 0)]);
}

#[test]
fn a_server_that_dies_after_the_first_set_leaves_its_report() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    // A warm-up and four questions.
    server.die_after(5);
    let json = place.dir.path().join("report.json");
    let settings = EvalSettings { json: Some(json.clone()), ..two_sets(&place, &server) };
    let report = run(&settings).unwrap();
    assert_eq!(answered(&report), [("first", 4, 0), ("second", 0, 3)]);
    let (first, second) = (&report.results[0], &report.results[1]);
    assert_eq!(first.figures.acceptance_length, Some(2.5));
    assert_eq!((&second.figures.tokens_per_second, second.noise.len()), (&None, 0));
    assert_eq!(report.sets.iter().map(|set| set.failed).collect::<Vec<_>>(), [0, 3]);
    let text = report.to_string();
    for line in ["3 rows; 0 skipped; 3 FAILED", "nothing was answered, 3 rows failed (second,"] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let written: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(
        (&written["results"][1]["failed"], written["tokens"].as_u64()),
        (&3.into(), Some(4 * TOKENS as u64))
    );
    assert!(written["results"][1]["tokens_per_second"].is_null());
}

#[test]
fn a_server_that_dies_between_servers_leaves_the_other_ones_figures() {
    let (place, fast) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let slow = FakeServer::start(Manners::Plain, PACE);
    slow.die_after(0);
    let plain_endpoint = Some(slow.url.clone());
    let settings = EvalSettings { plain_endpoint, ..place.settings(&fast) };
    // Nothing has been answered yet, so the address is named at once.
    let error = run(&settings).unwrap_err().to_string();
    assert!(error.contains(slow.url.trim_end_matches("/v1")), "{error}");
    // The warm-up is its last answer.
    let slow = FakeServer::start(Manners::Plain, PACE);
    slow.die_after(1);
    let report = run(&EvalSettings { plain_endpoint: Some(slow.url.clone()), ..settings }).unwrap();
    assert_eq!((of(&report, "none").responses, of(&report, "none").failed), (0, 3));
    let drafted = of(&report, "vllm");
    assert_eq!((drafted.responses, drafted.figures.speed_up), (4, None));
    assert_eq!(report.tokens_per_second.speed_up, None);
}

#[test]
fn several_at_a_time_have_no_speed_where_rows_failed() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    server.stumble("four", 99);
    let settings = EvalSettings { concurrency: vec![2], ..place.settings(&server) };
    let report = run(&settings).unwrap();
    let measured = of(&report, "vllm");
    assert_eq!((measured.responses, measured.failed), (3, 1));
    // Most of its seconds were spent waiting to retry.
    assert_eq!(measured.figures.tokens_per_second, None);
    assert!(measured.figures.decode_tokens_per_second.is_some());
}

#[test]
fn a_report_is_written_before_a_baseline_that_is_of_other_sets() {
    let (place, server) = (ServerDir::new(), FakeServer::start(Manners::Vllm, PACE));
    let path = |name: &str| Some(place.dir.path().join(name));
    let first = EvalSettings { json: path("first.json"), ..place.settings(&server) };
    run(&first).unwrap();
    let file = &first.prompts[0];
    let other = EvalSettings {
        json: path("other.json"),
        baseline: path("first.json"),
        prompts: vec![format!("other={file}")],
        ..first.clone()
    };
    let error = run(&other).unwrap_err().to_string();
    assert!(error.contains("nothing in common"), "{error}");
    assert!(path("other.json").unwrap().is_file());
}
