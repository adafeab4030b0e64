//! `dflash regenerate` as users run it: what is refused, resumed or restarted.

use std::path::{Path, PathBuf};
use std::process::Command;

use dflash_target::{Target, TargetConfig};
use serde_json::{Value, json};
use tch::{Device, Kind};

const WORDS: [&str; 7] = ["<unk>", "<eos>", "user", "assistant", "a", "b", "c"];

/// A directory with a random target and questions.
struct RegenerateDir(tempfile::TempDir);

impl RegenerateDir {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let mut config = TargetConfig::qwen3(32, 2, WORDS.len() as i64);
        config.eos_token_ids = vec![1];
        let target = place.path("target");
        Target::random(config, 4, Device::Cpu).save(&target, Kind::Float).unwrap();
        let vocabulary: serde_json::Map<String, Value> =
            WORDS.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}});
        std::fs::write(target.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        place.template("{{ m.role }} {{ m.content }} ");
        let questions = ["a", "b c", "c", "a b"].map(|q| json!({ "question": q }).to_string());
        std::fs::write(place.path("questions.jsonl"), questions.join("\n")).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Gives the target a template that prints `turn` for each message.
    fn template(&self, turn: &str) {
        let template = format!(
            "{{% for m in messages %}}{turn}{{% endfor %}}\
             {{% if add_generation_prompt %}}assistant{{% endif %}}"
        );
        std::fs::write(self.path("target/chat_template.jinja"), template).unwrap();
    }

    /// Exit code and stderr of `regenerate` with more arguments.
    fn run(&self, more: &str) -> (Option<i32>, String) {
        let line = "regenerate --target target --data questions.jsonl --output out.jsonl \
                    --device cpu ";
        let output = Command::new(env!("CARGO_BIN_EXE_dflash-engine"))
            .args((line.to_owned() + more).split_whitespace())
            .current_dir(self.0.path())
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }

    fn succeeds(&self, more: &str, expect: &str) -> Vec<String> {
        let (code, errors) = self.run(more);
        assert_eq!(code, Some(0), "{more}: {errors}");
        assert!(errors.contains(expect), "{more}: {errors}");
        lines(&self.path("out.jsonl"))
    }

    /// Asserts exit code 1, the message `expect`, advice on how to continue, and an unchanged
    /// output.
    fn refuses(&self, more: &str, expect: &str) {
        let before = std::fs::read(self.path("out.jsonl")).unwrap();
        let (code, errors) = self.run(more);
        assert_eq!(code, Some(1), "{more}: {errors}");
        assert!(errors.contains(expect) && errors.contains("--overwrite"), "{more}: {errors}");
        assert_eq!(std::fs::read(self.path("out.jsonl")).unwrap(), before);
    }
}

fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_finished_file_is_continued_or_kept_or_replaced_on_request() {
    let place = RegenerateDir::new();
    let two = place.succeeds("--max-new-tokens 8 --limit 2", "2 rows (0 from an earlier run)");
    assert_eq!(two.len(), 2);
    assert!(two[0].starts_with(r#"{"question":"a","answer":""#), "{}", two[0]);
    let all = place.succeeds("--max-new-tokens 8", "4 rows (2 from an earlier run)");
    assert_eq!((all.len(), &all[..2]), (4, &two[..]));
    place.succeeds("--max-new-tokens 8", "4 rows (4 from an earlier run)");
    place.refuses("--max-new-tokens 9", "--max-new-tokens: 8 there, 9 now");
    place.refuses("--max-new-tokens 8 --limit 3", "--limit asks for 3");
    place.template("{{ m.role }} {{ m.content }} b ");
    place.refuses("--max-new-tokens 8", "chat template: ");
    let other = place.succeeds("--max-new-tokens 8 --overwrite", "4 rows (0 from an earlier run)");
    assert_ne!(other, all);
}

#[test]
fn columns_that_no_prompt_has_are_named() {
    let place = RegenerateDir::new();
    let rows = [
        json!({"question": "a", "context": "b", "answer": "c"}),
        json!({"question": "b", "context": "c"}),
        json!({"system": "c", "messages": [
            {"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}),
    ];
    std::fs::write(place.path("questions.jsonl"), rows.map(|row| row.to_string()).join("\n"))
        .unwrap();
    let told = "unread columns: context (2 rows), system (1 row)\n";
    assert_eq!(place.succeeds("--max-new-tokens 2", told).len(), 3);
}

#[test]
fn a_file_that_something_else_made_is_kept() {
    let place = RegenerateDir::new();
    std::fs::write(place.path("out.jsonl"), "mine\n").unwrap();
    place.refuses("--max-new-tokens 8", "how it was made is not known");
    assert_eq!(place.succeeds("--max-new-tokens 8 --overwrite", "4 rows").len(), 4);
}
