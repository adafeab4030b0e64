//! Several drafts, prompt sets and decoding methods in one evaluation.

use std::fs;
use std::sync::atomic::AtomicBool;

use dflash_decode::{Limits, Sampling};
use dflash_settings::{EvalSettings, Thinking};
use serde_json::Value;

use crate::commands::{CommandDir, GO, PROMPTS};
use crate::models::{Decoder, random_target};

const LIMITS: Limits = Limits { max_new_tokens: 40, stop_ids: Vec::new() };

fn drafts(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

#[test]
fn look_up_makes_the_plain_text_in_fewer_steps() {
    let mut saved = 0;
    for seed in 0..6 {
        let target = random_target(40, seed);
        let mut plain = Decoder::plain(&target, Sampling::GREEDY);
        let mut ngram = Decoder::ngram(&target, (3, 10), Sampling::GREEDY);
        for prompt in [vec![5, 6, 7, 5, 6], vec![1], vec![9; 12]] {
            let expect = plain.generate(&prompt, &LIMITS, &GO).unwrap().tokens;
            let found = ngram.generate(&prompt, &LIMITS, &GO).unwrap();
            assert_eq!(found.tokens, expect, "seed {seed}, prompt {prompt:?}");
            let made: usize = found.accepted().iter().map(|accepted| accepted + 1).sum();
            // The last step may exceed the limit.
            assert!((39..39 + 11).contains(&made), "{:?}", found.accepted());
            saved += found.accepted().iter().sum::<usize>();
        }
    }
    // Small random models repeat themselves: some proposals are right.
    assert!(saved > 50, "{saved}");
}

#[test]
fn sampled_look_up_keeps_the_distribution() {
    let target = random_target(12, 3);
    let limits = Limits { max_new_tokens: 3, stop_ids: Vec::new() };
    let prompt = [4, 5, 6, 4, 5, 6, 4, 5];
    let mut counts = [[0u32; 12]; 2];
    let sampling = Sampling::at(20.0);
    let mut plain = Decoder::plain(&target, sampling);
    let mut ngram = Decoder::ngram(&target, (3, 4), sampling);
    for _ in 0..1500 {
        let texts = [
            plain.generate(&prompt, &limits, &GO).unwrap().tokens,
            ngram.generate(&prompt, &limits, &GO).unwrap().tokens,
        ];
        for (counts, text) in counts.iter_mut().zip(&texts) {
            counts[text[2] as usize] += 1;
        }
    }
    // Chi-squared of two samples with 11 degrees of freedom: one in a thousand exceeds 31.3.
    let statistic: f64 = (0..12)
        .filter(|&id| counts[0][id] + counts[1][id] > 0)
        .map(|id| {
            let (a, b) = (f64::from(counts[0][id]), f64::from(counts[1][id]));
            (a - b).powi(2) / (a + b)
        })
        .sum();
    assert!(statistic < 31.3, "{statistic}: {counts:?}");
}

#[test]
fn drafts_are_measured_side_by_side_with_plain_decoding() {
    let place = CommandDir::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    let settings = EvalSettings {
        draft: drafts(&["draft", "ngram", "none"]),
        html: Some(place.path("eval.html")),
        ..place.settings(&prompts)
    };
    let report = place.evaluate_with(&settings, &GO).unwrap();
    report.check().unwrap();
    let names: Vec<&str> = report.results.iter().map(|one| one.draft.as_str()).collect();
    assert_eq!(names, ["none", "draft", "ngram"]);
    let [plain, trained, ngram] = &report.results[..] else { panic!("{names:?}") };
    assert_eq!((plain.responses, trained.responses, ngram.responses), (5, 5, 5));
    // Greedy decoding gives the same texts, so the same number of tokens.
    assert_eq!((plain.tokens, plain.tokens), (trained.tokens, ngram.tokens));
    assert_eq!(plain.figures.acceptance_length, None);
    assert_eq!(trained.figures.acceptance_by_slot.len(), 4);
    assert_eq!(ngram.figures.acceptance_by_slot.len(), 11);
    for drafted in [trained, ngram] {
        let figures = &drafted.figures;
        assert!(drafted.lossless.as_ref().unwrap().holds);
        let whole = figures.tokens_per_second.unwrap() / plain.figures.tokens_per_second.unwrap();
        assert!((figures.speed_up.unwrap() / whole - 1.0).abs() < 1e-9);
        assert!(figures.time_to_first_token_s.unwrap() > 0.0);
        assert!(drafted.noise.contains_key("decode_speed_up"));
        let steps: u64 =
            drafted.answers.iter().filter_map(|one| Some(one.verification.as_ref()?.steps)).sum();
        let by_steps = 1.0
            + drafted
                .answers
                .iter()
                .filter_map(|one| Some(one.verification.as_ref()?.accepted))
                .sum::<u64>() as f64
                / steps as f64;
        assert!((figures.acceptance_length.unwrap() - by_steps).abs() < 1e-12);
    }
    assert!(report.memory.process_mib.unwrap() > 10.0);
    assert!(fs::read_to_string(place.path("eval.html")).unwrap().matches("<svg").count() >= 2);
    let table = report.to_string();
    for part in ["draft speed-up", "ngram speed-up", "Acceptance by position", "peak memory"] {
        assert!(table.contains(part), "{part}\n{table}");
    }
}

#[test]
fn sets_temperatures_and_thinking_are_reported_apart() {
    let place = CommandDir::new();
    let (one, two) = (place.write("one.jsonl", PROMPTS), place.write("two.jsonl", PROMPTS));
    let named = format!("gsm8k={}", two.display());
    let settings = EvalSettings {
        prompts: vec![one.display().to_string(), named],
        temperature: vec![0.0, 1.0],
        thinking: vec![Thinking::On, Thinking::Off],
        limit: Some(2),
        first_turn: true,
        ..place.settings(&one)
    };
    // The set's own prompt template applies to rows with its fields; the second row has turns.
    let report = place.evaluate_with(&settings, &GO).unwrap();
    assert_eq!(report.results.len(), 2 * 2 * 2 * 2);
    assert!(report.results.iter().all(|one| one.responses == 2));
    assert_eq!(report.results.iter().filter(|one| one.lossless.is_some()).count(), 4);
    assert_eq!(report.sets[1].title, "GSM8K");
    let table = report.to_string();
    assert!(table.contains("Speed-up and tau, temperature 1, not thinking"), "{table}");
    assert!(table.contains("mean"), "{table}");
}

#[test]
fn a_thinking_template_renders_other_prompts() {
    let place = CommandDir::new();
    let config = place.path("target/tokenizer_config.json");
    let text = fs::read_to_string(&config).unwrap();
    let thinks = text.replace("assistant{%", "assistant{% if enable_thinking %} a a{% endif %}{%");
    assert_ne!(thinks, text);
    fs::write(&config, thinks).unwrap();
    let prompts = place.write("prompts.jsonl", "{\"question\": \"b\"}\n");
    let settings = EvalSettings {
        thinking: vec![Thinking::On, Thinking::Off, Thinking::Auto],
        ..place.settings(&prompts)
    };
    let report = place.evaluate_with(&settings, &GO).unwrap();
    let lengths: Vec<usize> = report
        .results
        .iter()
        .filter(|one| one.is_plain())
        .map(|one| one.answers[0].prompt_tokens)
        .collect();
    assert_eq!(lengths, [5, 3, 3]);
}

#[test]
fn plain_decoding_alone_needs_no_draft() {
    let place = CommandDir::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    let settings = EvalSettings { draft: drafts(&["none"]), ..place.settings(&prompts) };
    let report = place.evaluate_with(&settings, &GO).unwrap();
    assert_eq!((report.results.len(), report.steps, report.draft.as_str()), (1, 0, "none"));
    assert!(report.to_string().contains("plain decoding only"));
}

#[test]
fn a_second_evaluation_says_what_moved() {
    let place = CommandDir::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    let first = place.settings(&prompts);
    place.evaluate_with(&first, &GO).unwrap();
    let settings = EvalSettings {
        baseline: first.json.clone(),
        json: Some(place.path("second.json")),
        ..first.clone()
    };
    let report = place.evaluate_with(&settings, &GO).unwrap();
    let comparison = report.comparison.as_ref().unwrap();
    assert_eq!(comparison.unmatched, 0);
    let of = |figure: &str| {
        let found = comparison.changes.iter().filter(|change| change.figure == figure);
        found.collect::<Vec<_>>()
    };
    // The same seed on the same machine: tau does not change at all.
    assert!(of("acceptance_length").iter().all(|change| change.change == 0.0 && change.paired));
    assert!(of("tokens_per_second").iter().all(|change| change.noise.is_some()));
    let written: Value =
        serde_json::from_slice(&fs::read(place.path("second.json")).unwrap()).unwrap();
    assert!(!written["comparison"]["changes"].as_array().unwrap().is_empty());
    let missing = EvalSettings { baseline: Some(place.path("gone.json")), ..first };
    let stopped = place.evaluate_with(&missing, &AtomicBool::new(true)).unwrap_err().to_string();
    assert!(stopped.contains("gone.json"), "{stopped}");
}

#[test]
fn several_answers_at_a_time_are_those_of_one() {
    let place = CommandDir::new();
    let settings = EvalSettings {
        draft: drafts(&["draft", "ngram"]),
        concurrency: vec![1, 3],
        ..place.settings(&place.write("prompts.jsonl", PROMPTS))
    };
    let report = place.evaluate_with(&settings, &GO).unwrap();
    report.check().unwrap();
    let names: Vec<_> =
        report.results.iter().map(|one| (one.mode.concurrency, one.draft.as_str())).collect();
    let drafts = ["none", "draft", "ngram"];
    let modes: Vec<_> = [1, 3].into_iter().flat_map(|n| drafts.map(|draft| (n, draft))).collect();
    assert_eq!(names, modes);
    // The same prompts, including the second turn's, and texts of the same length.
    let shape = |result: usize| {
        let answers = report.results[result].answers.iter();
        answers.map(|it| (it.row, it.turn, it.prompt_tokens, it.tokens)).collect::<Vec<_>>()
    };
    assert_eq!(shape(0).len(), 5);
    assert_eq!([shape(3), shape(4), shape(5)], [shape(0), shape(1), shape(2)]);
    let together = &report.results[4];
    let (one, whole) = (&report.results[1].figures, together.whole.seconds.unwrap());
    assert_eq!(together.figures.acceptance_length, one.acceptance_length);
    assert_eq!(together.figures.tokens_per_second, Some(together.tokens as f64 / whole));
    assert!(together.lossless.as_ref().is_some_and(|proof| proof.responses == 5 && proof.holds));
    let longest = together.answers.iter().map(|it| it.total_s).fold(0.0, f64::max);
    let all: f64 = together.answers.iter().map(|it| it.total_s).sum();
    assert!(whole >= longest && whole < all, "{longest} {whole} {all}");
}
