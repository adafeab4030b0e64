//! Content of reports.

use dflash_settings::Thinking;

use super::*;
use crate::figures::SetPart;

pub(crate) const GREEDY: EvalMode =
    EvalMode { temperature: 0.0, thinking: Thinking::Auto, concurrency: 1 };

/// A set answered plainly and by a draft that is `faster` times as fast.
pub(crate) fn two(set: &str, mode: EvalMode, faster: f64) -> Vec<Measured> {
    let answer = |row: usize, speed: f64, drafted: bool| Answer {
        row,
        turn: 0,
        prompt_tokens: 10 * (row + 1),
        tokens: 11,
        first_token_s: 0.5,
        total_s: 0.5 + (10.0 + row as f64) / speed,
        cut: false,
        verification: drafted.then(|| Verification::of(&[3, row % 4, 1], 3)),
    };
    let plain: Vec<Answer> = (0..8).map(|row| answer(row, 1.0, false)).collect();
    let drafted: Vec<Answer> = (0..8).map(|row| answer(row, faster, true)).collect();
    let none = Whole::default();
    let plain = Measured::new(set, mode, NO_DRAFT, plain, none.clone(), None, None);
    let lossless = Some(Lossless { identical: 8, responses: 8, ..Lossless::new(None) });
    let drafted = Measured::new(set, mode, "run", drafted, none, lossless, Some(&plain));
    vec![plain, drafted]
}

pub(crate) fn report(faster: f64) -> EvalReport {
    let sampled = EvalMode { temperature: 1.0, thinking: Thinking::On, concurrency: 1 };
    let results = [
        two("gsm8k", GREEDY, faster),
        two("alpaca", GREEDY, faster / 2.0),
        two("gsm8k", sampled, faster),
    ];
    let set = |name: &str, title: &str| SetFacts {
        name: name.into(),
        title: title.into(),
        source: format!("some/{name}"),
        revision: Some("1".repeat(40)),
        rows: 8,
        skipped: 1,
        failed: 0,
    };
    let facts = Facts {
        target: "target".into(),
        drafts: vec![DraftFacts {
            label: "run".into(),
            name: "drafts/run".into(),
            block_size: Some(4),
            vocabulary: None,
            weights: Some("d1".into()),
            head: None,
        }],
        sets: vec![set("gsm8k", "GSM8K"), set("alpaca", "Alpaca")],
        max_new_tokens: 11,
        device: "cpu, float32, 2 threads".into(),
        ..Facts::default()
    };
    EvalReport::new(facts, results.concat())
}

#[test]
fn the_top_level_is_the_first_draft_over_all_sets() {
    let report = report(4.0);
    assert_eq!((report.responses, report.tokens, report.skipped), (16, 176, 2));
    assert_eq!((report.draft.as_str(), report.steps), ("drafts/run", 48));
    assert_eq!(report.block_size, Some(4));
    let lossless = report.lossless.as_ref().unwrap();
    assert!(lossless.holds && lossless.responses == 16);
    let pooled = report.decode_tokens_per_second.speed_up.unwrap();
    assert!(pooled > 2.0 && pooled < 4.0, "{pooled}");
    assert_eq!(report.modes().len(), 2);
    report.check().unwrap();
}

#[test]
fn the_top_level_speed_up_is_that_of_the_results() {
    let mode = EvalMode { concurrency: 4, ..GREEDY };
    let [plain, drafted] = two("s", GREEDY, 4.0).try_into().unwrap();
    let whole = |seconds: f64| Whole {
        seconds: Some(2.0 * seconds),
        verification: None,
        parts: vec![SetPart { tokens: 44, seconds }; 2],
    };
    // Answers overlap, so the sum of their seconds gives another speed-up.
    let plain = Measured::new("s", mode, NO_DRAFT, plain.answers, whole(30.0), None, None);
    let drafted = Measured::new("s", mode, "run", drafted.answers, whole(20.0), None, Some(&plain));
    let own = drafted.figures.clone();
    let facts = Facts { drafts: report(4.0).drafts, ..Facts::default() };
    let report = EvalReport::new(facts, vec![plain, drafted]);
    assert!((own.speed_up.unwrap() - 1.5).abs() < 1e-9);
    assert_eq!(report.tokens_per_second.speed_up, own.speed_up);
    assert_eq!(report.tokens_per_second.speculative, own.tokens_per_second);
    assert_eq!(report.decode_tokens_per_second.speed_up, own.decode_speed_up);
    assert!(report.to_string().contains("1.50x \u{b1}0.00"), "{report}");
}

#[test]
fn what_is_published_is_of_one_set_and_way_and_of_drafts_with_weights() {
    let report = report(4.0);
    let kept = &report.evaluations;
    let names: Vec<_> = kept.iter().map(|it| (it.prompts.to_str().unwrap(), it.mode)).collect();
    let sampled = EvalMode { temperature: 1.0, thinking: Thinking::On, concurrency: 1 };
    assert_eq!(names, [("GSM8K", GREEDY), ("Alpaca", GREEDY), ("GSM8K", sampled)]);
    assert!(kept.iter().all(|it| it.draft_weights.as_deref() == Some("d1")));
    let figures = &report.results[1].figures;
    assert_eq!(Some(kept[0].acceptance.acceptance_length), figures.acceptance_length);
    assert_eq!(Some(kept[0].tokens_per_second.speed_up), figures.speed_up);
    let plain = &report.results[0].figures;
    assert_eq!(Some(kept[0].tokens_per_second.plain), plain.tokens_per_second);
    let weightless = Facts {
        drafts: vec![DraftFacts { weights: None, ..report.drafts[0].clone() }],
        sets: report.sets.clone(),
        ..Facts::default()
    };
    assert_eq!(EvalReport::new(weightless, report.results).evaluations, []);
}

#[test]
fn a_failure_anywhere_fails_the_report() {
    let mut report = report(4.0);
    let lossless = report.results[3].lossless.as_mut().unwrap();
    lossless.record(Some(crate::Difference {
        response: 0,
        position: 0,
        plain: Some(1),
        speculative: None,
        logit_gap: None,
        tie_tolerance: None,
    }));
    let error = report.check().unwrap_err().to_string();
    assert!(error.contains("1 of 25 answers differ"), "{error}");
}

#[test]
fn noise_is_that_of_drawn_answers_and_of_nothing_known_as_a_whole() {
    let [plain, drafted] = two("s", GREEDY, 4.0).try_into().unwrap();
    // Every answer is exactly four times as fast after its first token.
    assert!((drafted.figures.decode_speed_up.unwrap() - 4.0).abs() < 1e-9);
    assert!(drafted.noise["decode_speed_up"] < 1e-9, "{:?}", drafted.noise);
    assert!(drafted.noise["acceptance_length"] > 0.01);
    assert!(!plain.noise.contains_key("acceptance_length"));
    let whole = Whole { seconds: Some(3.0), ..Whole::default() };
    let mode = EvalMode { concurrency: 8, ..GREEDY };
    let many = Measured::new("s", mode, "run", drafted.answers, whole, None, None);
    assert!(!many.noise.contains_key("tokens_per_second"), "{:?}", many.noise);
    assert!(many.noise.contains_key("acceptance_length"));
    assert_eq!(many.table_speed_up(), None);
}

#[test]
fn a_way_has_a_name_in_words() {
    assert_eq!(GREEDY.to_string(), "greedy");
    let mode = EvalMode { temperature: 0.7, thinking: Thinking::Off, concurrency: 8 };
    assert_eq!(mode.to_string(), "temperature 0.7, not thinking, 8 at a time");
}
