//! Cards of drafters with many and with few recorded facts.

use std::collections::BTreeMap;
use std::path::PathBuf;

use dflash_formats::draft::{HeadFields, Outline};
use dflash_identity::TargetIdentity;
use dflash_run::{AcceptanceFigures, EvalMode, Evaluation, Identical, Rates};
use dflash_settings::{PushSettings, Thinking};
use serde_json::json;

use super::*;

fn settings(more: serde_json::Value) -> PushSettings {
    let mut settings = json!({"draft": "d", "repo": "me/drafter", "private": false,
        "dry_run": false, "allow_unevaluated": true, "create_pr": false});
    settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(settings).unwrap()
}

fn drafter(target: &str) -> Drafter {
    let identity = TargetIdentity { name: target.into(), config: "c0".into(), weights: None };
    Drafter {
        place: PathBuf::from("/home/someone/drafts"),
        files: BTreeMap::from([("config.json".to_owned(), PathBuf::from("/home/someone/x"))]),
        shape: Outline { block_size: Some(8), layers: Some(4), ..Outline::default() },
        parameters: None,
        dtype: None,
        made_for: Some(identity),
        origin: None,
        digest: None,
        evaluations: Vec::new(),
    }
}

fn report() -> Evaluation {
    Evaluation {
        prompts: PathBuf::from("/home/someone/gsm8k_test.jsonl"),
        responses: 100,
        tokens: 9000,
        max_new_tokens: 220,
        block_size: 8,
        device: "cpu, float32, 2 threads".to_owned(),
        acceptance: AcceptanceFigures {
            acceptance_length: 3.43216,
            acceptance_length_per_response: 3.5,
            acceptance_by_slot: vec![None, Some(0.75), Some(0.5)],
        },
        tokens_per_second: Rates {
            speculative: 473.0,
            plain: 438.0,
            speed_up: 1.0799,
            speed_up_error: Some(0.0312),
        },
        lossless: Some(Identical {
            responses: 100,
            identical: 99,
            ties: vec![json!({})],
            failures: vec![],
        }),
        ..Evaluation::default()
    }
}

fn text(target: &str, more: serde_json::Value, evidence: &[Evaluation]) -> String {
    let (settings, drafter) = (settings(more), drafter(target));
    Card { settings: &settings, drafter: &drafter, evidence }.text()
}

fn check(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!text.contains("someone"), "{text}");
}

#[test]
fn a_target_that_repeats_itself_is_named_beside_the_figures() {
    let named = "**On `gsm8k_test.jsonl` the target repeats itself in 90 of 100 answers; acceptance on such \
                 text says nothing.**";
    let of = |repetitive| Evaluation { repetitive, ..report() };
    let card = text("Qwen/Qwen3-8B", json!({}), &[of(90)]);
    check(&card, &[named, "same but for ties. But the target repeats itself in 90 of 100 answers"]);
    assert!(!card.contains("model-index"), "{card}");
    assert!(!text("Qwen/Qwen3-8B", json!({}), &[of(0)]).contains("repeats itself"));
}

#[test]
fn figures_stand_as_they_were_measured() {
    let text = text("Qwen/Qwen3-8B", json!({"license": "mit", "language": ["no"]}), &[report()]);
    check(
        &text,
        &[
            "---\nlicense: mit\nlanguage:\n- \"no\"\nlibrary_name: transformers\n",
            "base_model: Qwen/Qwen3-8B\nbase_model_relation: adapter\n",
            "  - task:\n      type: text-generation\n",
            "    dataset:\n      type: gsm8k_test\n      name: gsm8k_test.jsonl\n",
            "    - type: acceptance_length\n      name: Tokens per verify step\n      value: 3.432\n",
            "| gsm8k_test.jsonl | greedy | 100 | 9000 | 3.432 | 3.500 | 438.0 | 473.0 | 1.08 \u{b1} 0.03x | 99 of 100, 1 tied |",
            "\n\n**1.08 \u{b1} 0.03 times as fast as plain decoding** on gsm8k_test.jsonl (greedy, 100 answers), \
             with 3.43 tokens per verify step of at most 8; every text is the same but for ties.\n\n",
            "greedy, at most 220 tokens an answer, blocks of 8; cpu, float32, 2 threads.",
            "accepted: 1: 75.0%, 2: 50.0%.",
            "\"model\": \"me/drafter\", \"num_speculative_tokens\": 7}'",
            "--speculative-num-draft-tokens 8",
            "--spec-type draft-dflash --spec-draft-n-max 7",
            "draft, target, ids, max_new_tokens=256, temperature=0.0,",
        ],
    );
}

#[test]
fn what_is_not_known_is_said_to_be_so() {
    let text = text("qwen3-tiny", json!({}), &[]);
    check(
        &text,
        &[
            "speculative decoding with qwen3-tiny,",
            "TARGET below stands for",
            "**Nothing.** This drafter was published without an evaluation",
            "vllm serve TARGET",
            "The files say nothing of how it was trained.",
            "The run does not say what it was trained on.",
        ],
    );
    for absent in ["base_model", "model-index", "license", "datasets"] {
        assert!(!text.contains(absent), "{absent} in\n{text}");
    }
}

#[test]
fn settings_add_what_the_run_does_not_know() {
    let more = json!({"base_model": "my/target", "dataset": ["a/b", "a/b"], "revision": "v2"});
    let text = text("local", more, &[]);
    check(
        &text,
        &[
            "base_model: my/target\n",
            "datasets:\n- a/b\ntags:",
            "vllm serve my/target",
            "\"model\": \"me/drafter\", \"revision\": \"v2\", \"num_speculative_tokens\": 7",
            "--speculative-draft-model-revision v2\n",
            "hf download me/drafter --revision v2 --local-dir drafter\n",
            "\"me/drafter\", dtype=target.dtype, revision=\"v2\").eval()\n",
            "Whoever published it names a/b.",
        ],
    );
}

#[test]
fn an_engine_that_cannot_serve_it_is_left_out() {
    let settings = settings(json!({}));
    let mut drafter = drafter("Qwen/Qwen3-8B");
    drafter.shape.num_target_layers = Some(36);
    for (layers, serves) in [([1, 35], true), ([0, 35], false), ([1, 36], false)] {
        drafter.shape.target_layer_ids = layers.to_vec();
        let text = Card { settings: &settings, drafter: &drafter, evidence: &[] }.text();
        assert!(text.contains("vllm serve"), "{text}");
        assert_eq!(text.contains("sglang.launch_server"), serves, "{layers:?}\n{text}");
    }
}

#[test]
fn a_draft_with_another_head_is_served_by_dflash_alone() {
    let mut drafter = drafter("Qwen/Qwen3-8B");
    let card = |drafter: &Drafter, more| {
        let settings = settings(more);
        Card { settings: &settings, drafter, evidence: &[] }.text()
    };
    drafter.shape.head = HeadFields { kind: "markov".into(), ..HeadFields::default() };
    let text = card(&drafter, json!({}));
    check(
        &text,
        &[
            "| head | markov |",
            "do not serve it yet; dflash does. It proposes 7 tokens at a time.",
            "\ndflash serve --target Qwen/Qwen3-8B --draft me/drafter\n",
            "\ndflash generate --target Qwen/Qwen3-8B --draft me/drafter --prompt",
        ],
    );
    for absent in ["vllm serve", "sglang.launch_server", "llama-server", "dflash_generate"] {
        assert!(!text.contains(absent), "{absent} in\n{text}");
    }
    drafter.shape.head.sample_from_anchor = true;
    let text = card(&drafter, json!({"revision": "v2"}));
    check(
        &text,
        &[
            "It proposes 8 tokens at a time.",
            "hf download me/drafter --revision v2 --local-dir drafter\ndflash serve --target \
             Qwen/Qwen3-8B --draft drafter\n",
        ],
    );
}

#[test]
fn text_from_elsewhere_stays_in_its_cell() {
    let strange = Evaluation { prompts: "a|b<i>\n`c.jsonl".into(), ..report() };
    let text = text("Qwen/Qwen3-8B", json!({}), &[strange]);
    check(&text, &["| a\\|b&lt;i> `c.jsonl | greedy | 100 |", "name: \"a|b<i>\\n`c.jsonl\""]);
}

#[test]
fn ways_of_one_set_are_told_apart() {
    let mode = EvalMode { temperature: 1.0, thinking: Thinking::Off, concurrency: 8 };
    let text = text("Qwen/Qwen3-8B", json!({}), &[report(), Evaluation { mode, ..report() }]);
    check(
        &text,
        &[
            "      name: gsm8k_test.jsonl\n",
            "      name: \"gsm8k_test.jsonl, temperature 1, not thinking, 8 at a time\"\n",
            "| gsm8k_test.jsonl | greedy | 100 |",
            "| gsm8k_test.jsonl | temperature 1, not thinking, 8 at a time | 100 |",
        ],
    );
}
