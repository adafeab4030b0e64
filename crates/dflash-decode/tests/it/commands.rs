//! `evaluate` and `regenerate` from files to files, on a random model with a word-level tokenizer.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::models::{draft_config, random_draft, save_target};
use dflash_decode::{Error, EvalReport, evaluate, regenerate};
use dflash_model::objective::DraftVocabulary;
use dflash_model::target::{Target, TargetConfig, TargetOptions};
use dflash_settings::{Device as Asked, Dtype, EvalSettings, RegenerateSettings};
use serde_json::{Value, json};
use tch::{Device, Kind};

static GO: AtomicBool = AtomicBool::new(false);
const F32: TargetOptions = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
const WORDS: [&str; 12] =
    ["<unk>", "<eos>", "user", "assistant", "a", "b", "c", "d", "e", "f", "g", "<mask>"];

/// A directory with a target, a draft and prompts.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        let (target_dir, draft_dir) = (place.path("target"), place.path("draft"));
        let mut config = TargetConfig::qwen3(32, 2, WORDS.len() as i64);
        config.eos_token_ids = vec![1];
        config.max_position_embeddings = 100;
        save_target(config, 4, &target_dir);
        write_tokenizer(&target_dir);
        let target = Target::load(&target_dir, &F32).unwrap();
        fs::create_dir(&draft_dir).unwrap();
        random_draft(draft_config(&target, 4), 2).save(&draft_dir).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    fn settings(&self, prompts: &Path) -> EvalSettings {
        EvalSettings {
            target: "target".into(),
            draft: "draft".into(),
            prompts: prompts.into(),
            max_new_tokens: 20,
            limit: None,
            json: Some(self.path("report.json")),
            temperature: 0.0,
            seed: 0,
            tie_tolerance: None,
            allow_other_target: false,
            device: Asked::Cpu,
            dtype: Dtype::Float32,
        }
    }

    fn evaluate(&self, prompts: &Path) -> Result<EvalReport, Error> {
        self.evaluate_with(&self.settings(prompts), &GO)
    }

    fn evaluate_with(
        &self,
        settings: &EvalSettings,
        stop: &AtomicBool,
    ) -> Result<EvalReport, Error> {
        evaluate(settings, (&self.path("target"), &self.path("draft")), stop)
    }

    fn regenerate(&self, data: &Path, output: &str, stop: &AtomicBool) -> Result<usize, Error> {
        let settings = RegenerateSettings {
            target: "target".into(),
            data: data.into(),
            output: self.path(output),
            max_new_tokens: 15,
            limit: None,
            batch: 2,
            device: Asked::Cpu,
            dtype: Dtype::Float32,
        };
        regenerate(&settings, &self.path("target"), stop).map(|summary| summary.resumed)
    }
}

fn write_tokenizer(dir: &Path) {
    let vocab: serde_json::Map<String, Value> =
        WORDS.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let added = |id: usize| {
        json!({ "id": id, "content": WORDS[id], "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false })
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0), added(1), added(11)],
        "normalizer": null, "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<unk>" },
    });
    let template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}\
                    {% if add_generation_prompt %}assistant{% endif %}";
    let config = json!({ "eos_token": "<eos>", "unk_token": "<unk>", "chat_template": template });
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}

const PROMPTS: &str = r#"{"question": "a b c", "answer": "d"}
{"turns": ["a", "b b"]}
{"messages": [{"role": "user", "content": "e f"}, {"role": "assistant", "content": "g"}]}
{"input_ids": [2, 4, 3, 5, 6], "loss_mask": [0, 0, 0, 1, 1]}
"#;

#[test]
fn eval_reports_acceptance_speed_and_the_proof() {
    let place = Place::new();
    let report = place.evaluate(&place.write("prompts.jsonl", PROMPTS)).unwrap();
    report.check().unwrap();
    // The row of two turns has two answers.
    assert_eq!((report.responses, report.skipped), (5, 0));
    let length = report.acceptance.acceptance_length;
    assert!((1.0..=4.0).contains(&length));
    assert_eq!((report.slots.len(), report.acceptance.acceptance_by_slot.len()), (3, 4));
    assert_eq!(report.slots[0].reached, report.steps);
    assert!(report.tokens_per_second.speculative > 0.0);
    let written: Value =
        serde_json::from_slice(&fs::read(place.path("report.json")).unwrap()).unwrap();
    assert_eq!(written["acceptance_length"], json!(length));
    assert_eq!(written["lossless"]["holds"], json!(true));
    let table = report.to_string();
    for line in ["acceptance length (tau)", "of reached", "speed-up", "lossless  yes: "] {
        assert!(table.contains(line), "{table}");
    }
}

#[test]
fn eval_uses_the_vocabulary_of_a_pruned_draft() {
    let place = Place::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    let vocabulary = DraftVocabulary::new(vec![1, 4, 5, 9], WORDS.len());
    vocabulary.save(&place.path("draft")).unwrap();
    let report = place.evaluate(&prompts).unwrap();
    report.check().unwrap();
    assert_eq!(report.draft_vocabulary, Some(4));
    assert!(report.to_string().contains("which proposes from 4 tokens"), "{report}");
    let of_another_target = DraftVocabulary::new(vec![1, 4], WORDS.len() + 1);
    of_another_target.save(&place.path("draft")).unwrap();
    let error = place.evaluate(&prompts).unwrap_err().to_string();
    assert!(error.contains("selected from is 13 in the draft and 12"), "{error}");
    place.write("draft/draft_vocabulary.safetensors", "damaged");
    let error = place.evaluate(&prompts).unwrap_err().to_string();
    assert!(error.contains("draft_vocabulary.safetensors"), "{error}");
}

#[test]
fn a_report_of_a_changed_text_fails() {
    let place = Place::new();
    let mut report = place.evaluate(&place.write("prompts.jsonl", PROMPTS)).unwrap();
    let lossless = report.lossless.as_mut().unwrap();
    lossless.record(Some(dflash_decode::Difference {
        response: 0,
        position: 3,
        plain: Some(1),
        speculative: Some(2),
        logit_gap: Some(0.5),
        tie_tolerance: Some(0.1),
    }));
    let error = report.check().unwrap_err().to_string();
    assert!(error.contains("1 of 6 answers differ"), "{error}");
    let table = report.to_string();
    assert!(table.contains("DIFFERS: answer 5, token 3: plain 1, speculative 2"), "{table}");
    assert!(table.contains("logits 5.0e-1 apart (a tie up to 1.0e-1)"), "{table}");
}

#[test]
fn turns_build_on_the_answers_before_them() {
    let place = Place::new();
    let turns = |text: &str| {
        let report = place.evaluate(&place.write("turns.jsonl", text)).unwrap();
        (report.responses, report.tokens)
    };
    let (one, first_tokens) = turns("{\"turns\": [\"a\"]}\n");
    let (three, all_tokens) = turns("{\"turns\": [\"a\", \"b\", \"c\"]}\n");
    assert_eq!(one, 1);
    // 100 positions hold two turns with answers of 20 tokens for certain.
    assert!(three >= 2 && all_tokens > first_tokens, "{three} answers, {all_tokens} tokens");
}

#[test]
fn rows_without_room_for_an_answer_are_counted() {
    let place = Place::new();
    let long = format!("{{\"question\": \"{}\", \"answer\": \"b\"}}\n", "a ".repeat(90));
    let data = place.write("mixed.jsonl", &format!("{PROMPTS}{long}"));
    let report = place.evaluate(&data).unwrap();
    assert_eq!((report.responses, report.skipped), (5, 1));
    assert!(report.to_string().contains("1 skipped"));
}

#[test]
fn sampled_texts_are_not_compared_but_counted() {
    let place = Place::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    let run = |seed| {
        let settings = place.settings(&prompts);
        let settings = EvalSettings { temperature: 1.5, seed, limit: Some(1), ..settings };
        place.evaluate_with(&settings, &GO).unwrap()
    };
    let report = run(1);
    assert!(report.lossless.is_none() && report.check().is_ok());
    assert_eq!((report.temperature, report.responses), (1.5, 1));
    assert!(report.steps > 0);
    assert_eq!(run(1).slots, report.slots);
    assert!(report.to_string().contains("temperature 1.5"));
}

#[test]
fn a_stopped_evaluation_writes_nothing() {
    let place = Place::new();
    let settings = place.settings(&place.write("prompts.jsonl", PROMPTS));
    let stopped = place.evaluate_with(&settings, &AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    assert!(!place.path("report.json").exists());
}

#[test]
fn prompts_that_cannot_be_used_are_named_by_line() {
    let place = Place::new();
    let message =
        |text: &str| place.evaluate(&place.write("bad.jsonl", text)).unwrap_err().to_string();
    let broken = message("{\"question\": \"a\", \"answer\": \"b\"}\n{\"question\": \n");
    assert!(broken.contains("bad.jsonl:2:"), "{broken}");
    let unknown = message("{\"text\": \"a\"}\n");
    assert!(unknown.contains("bad.jsonl:1:"), "{unknown}");
    let foreign = message("{\"input_ids\": [99, 2], \"loss_mask\": [0, 1]}\n");
    assert!(foreign.contains("token 99 is outside the target's 12"), "{foreign}");
    assert!(message("").contains("no prompt"));
    let long = format!("{{\"question\": \"{}\", \"answer\": \"b\"}}\n", "a ".repeat(90));
    assert!(message(&long).contains("100 positions"));
    assert!(!place.path("report.json").exists());
}

#[test]
fn regenerated_rows_are_the_targets_answers_in_order() {
    let place = Place::new();
    let data = place.write("data.jsonl", PROMPTS);
    place.regenerate(&data, "out.jsonl", &GO).unwrap();
    let text = fs::read_to_string(place.path("out.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[0]["question"], "a b c");
    assert_eq!(rows[2]["messages"][0]["content"], "e f");
    for row in &rows {
        let ids = row["input_ids"].as_array().unwrap();
        let mask: Vec<i64> =
            row["loss_mask"].as_array().unwrap().iter().map(|bit| bit.as_i64().unwrap()).collect();
        let made = mask.iter().sum::<i64>() as usize;
        assert_eq!(ids.len(), mask.len());
        assert_eq!(mask[mask.len() - made..], vec![1; made]);
        let ended = ids.last() == Some(&json!(1));
        assert_eq!(row["finished"], json!(ended));
        assert!(made == 15 || ended, "{row}");
    }
    assert_eq!(rows[0]["input_ids"].as_array().unwrap()[..5], [2, 4, 5, 6, 3].map(|id| json!(id)));
}

#[test]
fn a_stopped_regeneration_continues_where_it_was() {
    let place = Place::new();
    let data = place.write("data.jsonl", PROMPTS);
    place.regenerate(&data, "whole.jsonl", &GO).unwrap();
    let whole = fs::read_to_string(place.path("whole.jsonl")).unwrap();
    let stopped = place.regenerate(&data, "out.jsonl", &AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    assert!(!place.path("out.jsonl").exists());
    let mut partial = fs::read_to_string(place.path("out.jsonl.partial")).unwrap();
    partial.extend(whole.split_inclusive('\n').take(2));
    place.write("out.jsonl.partial", &partial);
    assert_eq!(place.regenerate(&data, "out.jsonl", &GO).unwrap(), 2);
    assert_eq!(fs::read_to_string(place.path("out.jsonl")).unwrap(), whole);
    assert!(!place.path("out.jsonl.partial").exists());
}

#[test]
fn models_that_are_not_there_are_named() {
    let place = Place::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    fs::remove_file(place.path("draft").join("config.json")).unwrap();
    let error = place.evaluate(&prompts).unwrap_err().to_string();
    assert!(error.contains("draft has no config.json"), "{error}");
    fs::remove_file(place.path("target").join("config.json")).unwrap();
    let error = place.evaluate(&prompts).unwrap_err().to_string();
    assert!(error.contains("target has no config.json"), "{error}");
}
