//! `evaluate` and `regenerate` from files to files, with a random model and a word-level tokenizer.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::models::{Decoder, draft_config, random_draft, save_target};
use dflash_decode::{
    DraftSource, Error, EvalReport, Limits, RegenerateData, RegenerateSummary, Sampling, evaluate,
    regenerate,
};
use dflash_draft::objective::DraftVocabulary;
use dflash_eval::sets::SetRow;
use dflash_identity::file_digest;
use dflash_run::{Checkpoint, RunDir};
use dflash_settings::{Device as Asked, Dtype, EvalSettings, RegenerateSettings, Speculate};
use dflash_target::{Target, TargetConfig, TargetOptions};
use serde_json::{Value, json};
use tch::{Device, Kind};

pub(crate) static GO: AtomicBool = AtomicBool::new(false);
const F32: TargetOptions = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
const WORDS: [&str; 12] =
    ["<unk>", "<eos>", "user", "assistant", "a", "b", "c", "d", "e", "f", "g", "<mask>"];

/// A directory with a target, a draft and prompts.
pub(crate) struct CommandDir {
    dir: tempfile::TempDir,
}

impl CommandDir {
    pub(crate) fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        let (target_dir, draft_dir) = (place.path("target"), place.path("draft"));
        let mut config = TargetConfig::qwen3(32, 2, WORDS.len() as i64);
        config.eos_token_ids = vec![1];
        config.max_position_embeddings = 100;
        save_target(config, 4, &target_dir);
        write_tokenizer(&target_dir);
        let target = Target::load(&target_dir, &F32).unwrap();
        fs::create_dir(&draft_dir).unwrap();
        random_draft(draft_config(&target, 4), 2).draft.save(&draft_dir).unwrap();
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    pub(crate) fn settings(&self, prompts: &Path) -> EvalSettings {
        EvalSettings {
            target: Some("target".into()),
            draft: vec!["draft".into()],
            prompts: vec![prompts.display().to_string()],
            max_new_tokens: 20,
            json: Some(self.path("report.json")),
            device: Asked::Cpu,
            dtype: Dtype::Float32,
            speculate: vec![Speculate::Tokens(1024)],
            ..EvalSettings::default()
        }
    }

    fn evaluate(&self, prompts: &Path) -> Result<EvalReport, Error> {
        self.evaluate_with(&self.settings(prompts), &GO)
    }

    pub(crate) fn evaluate_with(
        &self,
        settings: &EvalSettings,
        stop: &AtomicBool,
    ) -> Result<EvalReport, Error> {
        let source = |name: &String| match name.as_str() {
            "none" => DraftSource::None,
            "ngram" => DraftSource::Ngram,
            name => DraftSource::Trained { name: name.into(), dir: self.path(name) },
        };
        let sources: Vec<DraftSource> = settings.draft.iter().map(source).collect();
        evaluate(settings, &self.path("target"), &sources, stop)
    }

    fn regeneration(&self, data: &Path, output: &str) -> RegenerateSettings {
        RegenerateSettings {
            target: "target".into(),
            draft: None,
            speculate: Speculate::Auto,
            allow_other_target: false,
            data: vec![data.to_str().unwrap().to_owned()],
            output: self.path(output),
            max_new_tokens: 15,
            limit: None,
            batch: 2,
            overwrite: false,
            device: Asked::Cpu,
            dtype: Dtype::Float32,
            processor: dflash_settings::ProcessorSettings::default(),
        }
    }

    fn run(&self, settings: &RegenerateSettings) -> Result<RegenerateSummary, Error> {
        self.make(settings, &GO)
    }

    /// Regenerates from one JSON file, whose rows the command reads.
    fn make(
        &self,
        settings: &RegenerateSettings,
        stop: &AtomicBool,
    ) -> Result<RegenerateSummary, Error> {
        let path = PathBuf::from(&settings.data[0]);
        let row = |raw: Result<dflash_chat::RawRow, dflash_chat::Error>| {
            let raw = raw?;
            Ok(SetRow { path: path.clone(), line: raw.line, row: raw.parse(&path)? })
        };
        let rows = dflash_chat::raw_rows(&path)?.take(settings.limit.unwrap_or(usize::MAX));
        let rows = rows.map(row).collect::<Result<Vec<_>, Error>>()?;
        let data = RegenerateData { files: vec![path.clone()], rows };
        regenerate(settings, &self.path("target"), DraftSource::None, data, stop)
    }

    fn regenerate(&self, data: &Path, output: &str, stop: &AtomicBool) -> Result<usize, Error> {
        let settings = self.regeneration(data, output);
        self.make(&settings, stop).map(|summary| summary.resumed)
    }

    /// The rows of a regenerated file.
    fn made(&self, output: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(output)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The target's greedy answer to a prompt, of at most 15 tokens.
    fn answer(&self, prompt: &[i64]) -> Vec<i64> {
        let target = Target::load(&self.path("target"), &F32).unwrap();
        let limits = Limits { max_new_tokens: 15, stop_ids: vec![1] };
        let mut plain = Decoder::plain(&target, Sampling::GREEDY);
        plain.generate(prompt, &limits, &GO).unwrap().tokens
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

pub(crate) const PROMPTS: &str = r#"{"question": "a b c", "answer": "d"}
{"turns": ["a", "b b"]}
{"messages": [{"role": "user", "content": "e f"}, {"role": "assistant", "content": "g"}]}
{"input_ids": [2, 4, 3, 5, 6], "loss_mask": [0, 0, 0, 1, 1]}
"#;

#[test]
fn eval_reports_acceptance_speed_and_the_proof() {
    let place = CommandDir::new();
    let report = place.evaluate(&place.write("prompts.jsonl", PROMPTS)).unwrap();
    report.check().unwrap();
    // The two-turn row has two answers.
    assert_eq!((report.responses, report.skipped), (5, 0));
    let length = report.acceptance.acceptance_length;
    assert!((1.0..=4.0).contains(&length));
    assert_eq!((report.slots.len(), report.acceptance.acceptance_by_slot.len()), (3, 4));
    assert_eq!(report.slots[0].reached, report.steps);
    assert!(report.tokens_per_second.speculative.unwrap() > 0.0);
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
fn eval_keeps_its_report_beside_a_run_s_checkpoint_alone() {
    let place = CommandDir::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    let checkpoint = Checkpoint::at(&place.path("run"), 7);
    fs::create_dir(place.path("run")).unwrap();
    fs::rename(place.path("draft"), &checkpoint.dir).unwrap();
    let settings = EvalSettings { json: None, ..place.settings(&prompts) };
    let measure = |dir: &Path| {
        let draft = DraftSource::Trained { name: "draft".into(), dir: dir.into() };
        evaluate(&settings, &place.path("target"), &[DraftSource::Ngram, draft], &GO).unwrap()
    };
    let report = measure(&checkpoint.dir);
    let kept = checkpoint.evaluations().unwrap();
    let weights = file_digest(&checkpoint.dir.join("model.safetensors")).unwrap();
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0].draft_weights.as_ref(), Some(&weights));
    assert_eq!(kept[0].target_identity, report.target_identity);
    assert_eq!((kept[0].responses, &kept[0].prompts), (report.responses, &prompts));
    // Plain decoding, n-gram lookup, and the draft, the only one with weights.
    let measured = &report.results[2];
    // Numbers may lose their last bit in a file.
    let is_near = |kept: f64, told: Option<f64>| (kept - told.unwrap()).abs() < 1e-12 * kept;
    let (figures, speed) = (&measured.figures, &kept[0].tokens_per_second);
    assert!(is_near(kept[0].acceptance.acceptance_length, figures.acceptance_length));
    assert!(is_near(speed.speed_up, figures.speed_up));
    let lossless = measured.lossless.as_ref().unwrap();
    assert_eq!(kept[0].lossless.as_ref().unwrap().identical, lossless.identical);
    assert_eq!(RunDir::at(place.path("run")).checkpoints().unwrap().len(), 1);
    // A repeated measurement replaces the report; a foreign directory is left alone.
    measure(&checkpoint.dir);
    assert_eq!(checkpoint.evaluations().unwrap().len(), 1);
    let elsewhere = place.path("elsewhere");
    fs::rename(&checkpoint.dir, &elsewhere).unwrap();
    fs::remove_file(elsewhere.join(Checkpoint::EVALUATIONS)).unwrap();
    measure(&elsewhere);
    assert!(!elsewhere.join(Checkpoint::EVALUATIONS).exists());
}

#[test]
fn eval_uses_the_vocabulary_of_a_pruned_draft() {
    let place = CommandDir::new();
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
    let place = CommandDir::new();
    let mut report = place.evaluate(&place.write("prompts.jsonl", PROMPTS)).unwrap();
    let lossless = report.results[1].lossless.as_mut().unwrap();
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
    let place = CommandDir::new();
    let turns = |text: &str| {
        let report = place.evaluate(&place.write("turns.jsonl", text)).unwrap();
        (report.responses, report.tokens)
    };
    let (one, first_tokens) = turns("{\"turns\": [\"a\"]}\n");
    let (three, all_tokens) = turns("{\"turns\": [\"a\", \"b\", \"c\"]}\n");
    assert_eq!(one, 1);
    // 100 positions always fit two turns with answers of 20 tokens.
    assert!(three >= 2 && all_tokens > first_tokens, "{three} answers, {all_tokens} tokens");
}

#[test]
fn rows_without_room_for_an_answer_are_counted() {
    let place = CommandDir::new();
    let long = format!("{{\"question\": \"{}\", \"answer\": \"b\"}}\n", "a ".repeat(90));
    let data = place.write("mixed.jsonl", &format!("{PROMPTS}{long}"));
    let report = place.evaluate(&data).unwrap();
    assert_eq!((report.responses, report.skipped), (5, 1));
    assert!(report.to_string().contains("1 skipped"));
}

#[test]
fn sampled_texts_are_not_compared_but_counted() {
    let place = CommandDir::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    let run = |seed| {
        let settings = place.settings(&prompts);
        let settings = EvalSettings { temperature: vec![1.5], seed, limit: Some(1), ..settings };
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
    let place = CommandDir::new();
    let settings = place.settings(&place.write("prompts.jsonl", PROMPTS));
    let stopped = place.evaluate_with(&settings, &AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    assert!(!place.path("report.json").exists());
}

#[test]
fn prompts_that_cannot_be_used_are_named_by_line() {
    let place = CommandDir::new();
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
    let place = CommandDir::new();
    let data = place.write("data.jsonl", PROMPTS);
    place.regenerate(&data, "out.jsonl", &GO).unwrap();
    let text = fs::read_to_string(place.path("out.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[0]["question"], "a b c");
    assert_eq!(rows[2]["messages"][0]["content"], "e f");
    for (number, row) in rows.iter().enumerate() {
        let (ids, mask) = (column(row, "input_ids"), column(row, "loss_mask"));
        assert_eq!(ids.len(), mask.len());
        let mut answers = mask.split(|&bit| bit == 0).filter(|answer| !answer.is_empty());
        // The two-turn row has two answers.
        assert_eq!(answers.clone().count(), if number == 1 { 2 } else { 1 });
        let last = answers.next_back().unwrap();
        assert_eq!(mask.last(), Some(&1));
        let ended = ids.last() == Some(&1);
        assert!(last.len() == 15 || ended, "{row}");
        assert!(number == 1 || row["finished"] == json!(ended), "{row}");
    }
    assert_eq!(rows[0]["input_ids"].as_array().unwrap()[..5], [2, 4, 5, 6, 3].map(|id| json!(id)));
}

#[test]
fn a_stopped_regeneration_continues_where_it_was() {
    let place = CommandDir::new();
    let data = place.write("data.jsonl", PROMPTS);
    place.regenerate(&data, "whole.jsonl", &GO).unwrap();
    let whole = fs::read_to_string(place.path("whole.jsonl")).unwrap();
    let stopped = place.regenerate(&data, "out.jsonl", &AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    assert!(!place.path("out.jsonl").exists());
    let mut partial = fs::read_to_string(place.path("out.jsonl.partial")).unwrap();
    partial.extend(whole.lines().take(2).map(|row| format!("[{row}]\n")));
    place.write("out.jsonl.partial", &partial);
    assert_eq!(place.regenerate(&data, "out.jsonl", &GO).unwrap(), 2);
    assert_eq!(fs::read_to_string(place.path("out.jsonl")).unwrap(), whole);
    assert!(!place.path("out.jsonl.partial").exists());
}

/// Integers of a column.
fn column(row: &Value, name: &str) -> Vec<i64> {
    row[name].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

#[test]
fn questions_alone_are_answered() {
    let place = CommandDir::new();
    let pairs = place.write("pairs.jsonl", PROMPTS);
    let questions = place.write(
        "questions.jsonl",
        "{\"question\": \"a b c\"}\n{\"prompt\": \"b\"}\n{\"instruction\": \"a\", \"input\": \"b\"}\n",
    );
    place.regenerate(&pairs, "pairs.out", &GO).unwrap();
    assert_eq!(place.run(&place.regeneration(&questions, "out")).unwrap().rows, 3);
    let made = place.made("out");
    assert_eq!(made[0], place.made("pairs.out")[0]);
    assert_eq!(made[1]["messages"][0]["content"], "b");
    assert_eq!(made[2]["messages"][0]["content"], "a\nb");
    let report = place.evaluate(&questions).unwrap();
    assert_eq!(report.responses, 3);
}

#[test]
fn every_answer_of_a_conversation_is_made_from_the_new_ones() {
    let place = CommandDir::new();
    let turns = r#"{"role": "user", "content": "a b"}, {"role": "assistant", "content": "g g g"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "f f"}"#;
    let data = format!("{{\"messages\": [{}]}}\n", turns.replace('\n', " "));
    place.regenerate(&place.write("data.jsonl", &data), "out", &GO).unwrap();
    // The tests' template writes each answer as words without an end token, so a finished answer is
    // not continued by the next prompt: each gets its own row.
    let first_prompt = [2, 4, 5, 3];
    let first = place.answer(&first_prompt);
    let mut history = first_prompt.to_vec();
    history.extend(first.iter().filter(|&&id| id != 1));
    history.extend([2, 6, 3]);
    let second = place.answer(&history);
    let rows = place.made("out");
    let last = rows.last().unwrap();
    assert_eq!(column(last, "input_ids"), [history.clone(), second.clone()].concat());
    let mask = column(last, "loss_mask");
    assert_eq!(mask[history.len()..], vec![1; second.len()]);
    match first.last() == Some(&1) {
        true => {
            assert_eq!(column(&rows[0], "input_ids"), [&first_prompt[..], &first].concat());
            assert_eq!(rows.len(), 2);
            assert_eq!(mask[..history.len()], vec![0; history.len()]);
        }
        false => {
            assert_eq!(rows.len(), 1);
            assert_eq!(mask[4..4 + first.len()], vec![1; first.len()]);
        }
    }
    let texts: Vec<&str> =
        (0..4).map(|turn| last["messages"][turn]["content"].as_str().unwrap()).collect();
    assert_eq!((texts[0], texts[2]), ("a b", "c"));
    assert!(texts[1] != "g g g" && texts[3] != "f f", "{texts:?}");
}

#[test]
fn recorded_calls_stay_before_their_results() {
    let place = CommandDir::new();
    let data = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "d"}]});
    place.regenerate(&place.write("data.jsonl", &data.to_string()), "out", &GO).unwrap();
    let row = place.made("out").remove(0);
    assert_eq!(row["messages"][1], data["messages"][1]);
    // The tests' tokenizer does not know the word "tool".
    assert_eq!(column(&row, "input_ids")[..7], [2, 4, 3, 5, 0, 6, 3]);
    assert_eq!(column(&row, "loss_mask")[..7], [0; 7]);
}

#[test]
fn a_larger_limit_goes_on_where_it_was() {
    let place = CommandDir::new();
    let data = place.write("data.jsonl", PROMPTS);
    place.regenerate(&data, "whole", &GO).unwrap();
    let run = |limit| place.run(&RegenerateSettings { limit, ..place.regeneration(&data, "out") });
    let summary = run(Some(2)).unwrap();
    assert_eq!((summary.rows, summary.resumed), (2, 0));
    let again = run(Some(2)).unwrap();
    assert_eq!((again.rows, again.resumed, again.tokens), (2, 2, 0));
    let more = run(Some(3)).unwrap();
    assert_eq!((more.rows, more.resumed), (3, 2));
    assert_eq!(place.made("out"), place.made("whole")[..3]);
    let before = fs::read(place.path("out")).unwrap();
    let fewer = run(Some(1)).unwrap_err().to_string();
    assert!(fewer.contains("answers to 3 prompts already, and --limit asks for 1"), "{fewer}");
    assert_eq!(fs::read(place.path("out")).unwrap(), before);
    assert_eq!(run(None).unwrap().resumed, 3);
    assert_eq!(fs::read(place.path("out")).unwrap(), fs::read(place.path("whole")).unwrap());
}

#[test]
fn other_settings_and_targets_are_refused_and_named() {
    let place = CommandDir::new();
    let data = place.write("data.jsonl", PROMPTS);
    let settings = place.regeneration(&data, "out");
    place.run(&settings).unwrap();
    place.regenerate(&data, "half", &AtomicBool::new(true)).unwrap_err();
    let half = RegenerateSettings { output: place.path("half"), ..settings.clone() };
    let finished = fs::read(place.path("out")).unwrap();
    let refused = |change: &dyn Fn(), other: &RegenerateSettings, what: &str| {
        change();
        for (settings, file) in [(other, "out"), (&half, "half.partial")] {
            let settings = RegenerateSettings { output: settings.output.clone(), ..other.clone() };
            let error = place.run(&settings).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains(file), "{what}: {error}");
            assert!(error.contains("--overwrite"), "{error}");
        }
        assert_eq!(fs::read(place.path("out")).unwrap(), finished);
    };
    let longer = RegenerateSettings { max_new_tokens: 20, ..settings.clone() };
    refused(&|| (), &longer, "--max-new-tokens: 15 there, 20 now");
    let doubles = RegenerateSettings { dtype: Dtype::Bfloat16, ..settings.clone() };
    refused(&|| (), &doubles, "--dtype: float32 there, bfloat16 now");
    let edit = |name: &str, from: &str, to: &str| {
        let path = place.path("target").join(name);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from));
        fs::write(&path, text.replace(from, to)).unwrap();
    };
    refused(
        &|| edit("tokenizer_config.json", "assistant{%", " assistant{%"),
        &settings,
        "chat template: ",
    );
    edit("tokenizer_config.json", " assistant{%", "assistant{%");
    refused(&|| fs::write(&data, PROMPTS.replace("a b c", "a b")).unwrap(), &settings, "data: ");
    fs::write(&data, PROMPTS).unwrap();
    refused(
        &|| {
            let mut config = TargetConfig::qwen3(32, 2, WORDS.len() as i64);
            config.eos_token_ids = vec![1];
            config.max_position_embeddings = 100;
            save_target(config, 5, &place.path("target"));
        },
        &settings,
        "target: ",
    );
    let afresh = RegenerateSettings { overwrite: true, ..settings };
    assert_eq!(place.run(&afresh).unwrap().resumed, 0);
    assert_ne!(fs::read(place.path("out")).unwrap(), finished);
    assert_eq!(place.run(&afresh).unwrap().tokens, 0);
}

#[test]
fn a_turn_without_content_is_named() {
    let place = CommandDir::new();
    let data =
        place.write("d.jsonl", "{\"messages\": [{\"role\": \"user\", \"contnt\": \"a\"}]}\n");
    for error in [place.regenerate(&data, "out", &GO).err(), place.evaluate(&data).err()] {
        let error = error.unwrap().to_string();
        assert!(error.contains("d.jsonl:1: a turn that is not the assistant's has no content"));
    }
}

#[test]
fn models_that_are_not_there_are_named() {
    let place = CommandDir::new();
    let prompts = place.write("prompts.jsonl", PROMPTS);
    fs::remove_file(place.path("draft").join("config.json")).unwrap();
    let error = place.evaluate(&prompts).unwrap_err().to_string();
    assert!(error.contains("draft has no config.json"), "{error}");
    fs::remove_file(place.path("target").join("config.json")).unwrap();
    let error = place.evaluate(&prompts).unwrap_err().to_string();
    assert!(error.contains("target has no config.json"), "{error}");
}
