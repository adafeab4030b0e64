//! The whole command on small inputs: rows, masks, order, faults.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use dflash_data::Dataset;
use dflash_prepare::{Error, Summary, prepare};
use dflash_settings::PrepareSettings;
use dflash_test_support::byte_tokenizer;
use serde_json::{Value, json};

#[path = "prepare/faults.rs"]
mod faults;
#[path = "prepare/masks.rs"]
mod masks;
#[path = "prepare/rows.rs"]
mod rows;
#[path = "prepare/sources.rs"]
mod sources;

use rows::write_parquet;

/// A plain ChatML template.
const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Drops earlier reasoning, as Qwen3's does.
const FORGETFUL: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Opens a reasoning block that recorded answers do not have.
const SCAFFOLD: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}";
/// Writes the number of messages first, so that no two renders share a prefix.
const UNSTABLE: &str = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}";
/// Writes how long the last text is instead of the text.
const SILENT: &str = "{% for m in messages %}{% if not loop.last %}{{ m.content }}{% endif %}\
    {% endfor %}{{ messages | length }}";
/// Closes the reasoning block that it opens in the prompt, as for answers without reasoning, and
/// opens the answer with a marker of its own once there are two turns.
const CLOSED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}";
/// Ends a turn with the start of the next one, as GLM does, and names its end only in a loop.
const NEXT_ENDS: &str = "{% for m in messages %}{% if m.role == 'user' %}<|im_end|>{% else %}\
    <|im_start|>{% endif %}{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>{% endif %}";
/// Insists on alternating roles.
const STRICT: &str = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
    {{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}";

/// A directory with a model, data and outputs.
struct Bench {
    root: tempfile::TempDir,
}

impl Bench {
    fn new(template: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("model");
        fs::create_dir(&model).unwrap();
        let tokenizer = byte_tokenizer(&["<|im_start|>", "<|im_end|>"]);
        fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        fs::write(model.join("chat_template.jinja"), template).unwrap();
        Self { root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn config(&self, data: &[&str]) -> PrepareSettings {
        PrepareSettings {
            target: Some(self.path("model").to_str().unwrap().to_owned()),
            data: data.iter().map(|&word| word.to_owned()).collect(),
            output: Some(self.path("out")),
            seq_length: 1000,
            minimum_valid_tokens: 1,
            limit: None,
            shuffle_seed: None,
            workers: Some(2),
            shard_mb: 500.0,
            overwrite: true,
            skip_bad_rows: false,
            chat_template_kwargs: None,
        }
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn prepare(&self, text: &str) -> Result<Summary, Error> {
        let file = self.write("rows.jsonl", text);
        prepare(&self.config(&[&file]), &AtomicBool::new(false))
    }

    /// Every row with its supervised spans in brackets.
    fn rows(&self) -> Vec<String> {
        marked(&self.path("out"))
    }

    fn check_refusal(&self, text: &str, expect: &str) {
        let error = self.prepare(text).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
        self.check_clean();
    }

    /// Checks that neither an output nor a temporary file exists.
    fn check_clean(&self) {
        let names: Vec<String> = fs::read_dir(self.root.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with('.') || name == "out")
            .collect();
        assert!(names.is_empty(), "{names:?}");
    }
}

fn marked(dir: &Path) -> Vec<String> {
    let dataset = Dataset::open(dir).unwrap();
    (0..dataset.len())
        .map(|row| {
            let sample = dataset.get(row).unwrap();
            let mut text = String::new();
            let mut inside = false;
            for (&id, &supervised) in sample.input_ids.iter().zip(&sample.loss_mask) {
                if supervised != inside {
                    text.push(if supervised { '[' } else { ']' });
                    inside = supervised;
                }
                match id {
                    256 => text.push('<'),
                    257 => text.push('>'),
                    byte => text.push(char::from(u8::try_from(byte).unwrap())),
                }
            }
            text.push_str(if inside { "]" } else { "" });
            text.replace('\n', "/")
        })
        .collect()
}

const TWO_TURNS: &str = r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r</think>a"}, {"from": "human", "value": "s"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "left out"}]}"#;

#[test]
fn turns_that_continue_each_other_share_a_row() {
    let bench = Bench::new(CHATML);
    bench.prepare(TWO_TURNS).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/[r</think>a>]/<user/s>/<assistant/[b>]/"]);
}

#[test]
fn rewritten_history_gives_every_turn_its_row() {
    let bench = Bench::new(FORGETFUL);
    bench.prepare(TWO_TURNS).unwrap();
    let expect =
        ["<user/q>/<assistant/[r</think>a>]", "<user/q>/<assistant/a>/<user/s>/<assistant/[b>]/"];
    assert_eq!(bench.rows(), expect);
}

#[test]
fn a_prompt_beyond_the_history_is_cut_where_the_answer_differs() {
    let bench = Bench::new(SCAFFOLD);
    bench.prepare(r#"{"question": "q", "answer": "a"}"#).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/[a>]/"]);
}

#[test]
fn an_answer_is_found_by_its_text_and_follows_the_server_s_prompt() {
    let unstable = Bench::new(UNSTABLE);
    let summary = unstable.prepare(TWO_TURNS).unwrap().to_string();
    assert_eq!(unstable.rows(), ["1q[r</think>a]", "3qr</think>as[b]"]);
    let told = "answers            2 (2 found by their text and put after the server's prompt; 2 \
                without an end of turn, which the template does not print)\n";
    assert!(summary.contains(told), "{summary}");

    let closed = Bench::new(CLOSED);
    closed.prepare(TWO_TURNS).unwrap();
    let expect = [
        "<user/q>/<assistant/<think></think>[r</think>a>]",
        "<user/q>/<assistant/r</think>a>/<user/s>/<assistant/<think></think>[b>]/",
    ];
    assert_eq!(closed.rows(), expect);
    let text = fs::read(closed.path("out/dflash_prepare.json")).unwrap();
    let provenance: Value = serde_json::from_slice(&text).unwrap();
    let counts = json!({
        "after_prompt": 0, "in_server_context": 2, "in_own_context": 0, "without_end": 0
    });
    assert_eq!(provenance["answers"], counts);
}

#[test]
fn a_turn_that_the_next_one_ends_is_supervised_to_its_end() {
    let bench = Bench::new(NEXT_ENDS);
    let config = json!({"eos_token_id": [7, 257]}).to_string();
    fs::write(bench.path("model/generation_config.json"), config).unwrap();
    let summary = bench.prepare(TWO_TURNS).unwrap().to_string();
    // The last turn gets the end that a turn of the user's would bring.
    assert_eq!(bench.rows(), [">q<[r</think>a>]s<[b>]"]);
    assert!(summary.contains("answers            2\n"), "{summary}");
    // Nothing that generation does not stop at is appended.
    fs::remove_file(bench.path("model/generation_config.json")).unwrap();
    let summary = bench.prepare(r#"{"question": "q", "answer": "a"}"#).unwrap().to_string();
    assert_eq!(bench.rows(), [">q<[a]"]);
    assert!(summary.contains("answers            1 (1 without an end of turn"), "{summary}");
}

#[test]
fn conversations_that_cannot_be_masked_are_dropped_and_counted() {
    let refused = Bench::new(SILENT);
    refused.check_refusal(
        r#"{"question": "q", "answer": "a"}"#,
        "none of the 1 rows can be trained on: 1 an answer that the chat template does not print",
    );
    let bench = Bench::new(STRICT);
    let rows = [
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
        r#"{"messages": [{"role": "assistant", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
        r#"{"messages": []}"#,
        r#"{"messages": [{"role": "user", "content": "q"}]}"#,
        r#"{"messages": [{"role": "narrator", "content": "q"}]}"#,
    ];
    let summary = bench.prepare(&rows.join("\n")).unwrap();
    assert_eq!(bench.rows(), ["q>[a>]"]);
    let text = summary.to_string();
    for line in [
        "rows read          5",
        "rows written       1",
        "1: empty conversation",
        "1: no assistant turn after another turn",
        "1: unknown role",
        "rows.jsonl:2: the chat template refused the conversation: roles must alternate",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let provenance: Value =
        serde_json::from_slice(&fs::read(bench.path("out/dflash_prepare.json")).unwrap()).unwrap();
    assert_eq!(provenance["dropped"]["template_refused"]["count"], 1);
    assert_eq!(provenance["rows"], 1);
}

#[test]
fn a_dataset_says_which_target_it_was_prepared_for() {
    let bench = Bench::new(CHATML);
    let row = r#"{"question": "q", "answer": "a"}"#;
    bench.prepare(row).unwrap();
    let data = dflash_data::Dataset::open(&bench.path("out")).unwrap();
    let prepared_for = data.prepared_for().unwrap().unwrap();
    let model = bench.path("model");
    let expected = dflash_data::PreparedFor::of(&model, &model.to_string_lossy()).unwrap();
    assert_eq!(prepared_for, expected);
    assert!(prepared_for.tokenizer.is_some() && prepared_for.name == "model", "{prepared_for:?}");
    // A dataset of other software says nothing.
    fs::remove_file(bench.path("out/dflash_prepare.json")).unwrap();
    assert_eq!(data.prepared_for().unwrap(), None);
}

#[test]
fn rows_are_cut_to_the_sequence_length() {
    let bench = Bench::new(CHATML);
    let long = json!({"question": "q", "answer": "x".repeat(100)});
    let hopeless = json!({"question": "y".repeat(100), "answer": "a"});
    let file = bench.write("rows.jsonl", &format!("{long}\n{hopeless}\n"));
    let config = PrepareSettings { seq_length: 25, ..bench.config(&[&file]) };
    let summary = prepare(&config, &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/[xxxxx]"]);
    assert_eq!(summary.tally.truncated, 1);
    assert!(summary.to_string().contains("1: nothing supervised within --seq-length"));
}

#[test]
fn pre_tokenized_rows_are_taken_as_they_are() {
    let bench = Bench::new(CHATML);
    let row =
        r#"{"question": "q", "answer": "a", "input_ids": [65, 66, 67], "loss_mask": [0, 1, 0]}"#;
    bench.prepare(row).unwrap();
    assert_eq!(bench.rows(), ["A[B]C"]);
    fs::remove_dir_all(bench.path("out")).unwrap();
    bench.check_refusal(
        r#"{"input_ids": [258], "loss_mask": [1]}"#,
        "rows.jsonl:1: token id 258 lies outside the model's vocabulary of 258",
    );
}

#[test]
fn the_result_does_not_depend_on_the_workers() {
    let bench = Bench::new(CHATML);
    let rows: Vec<String> = (0..700)
        .map(|i| json!({"question": format!("q{i}"), "answer": "a".repeat(1 + i % 40)}).to_string())
        .collect();
    let file = bench.write("rows.json", &format!("[{}]", rows.join(",\n")));
    let run = |workers: usize| {
        let config =
            PrepareSettings { workers: Some(workers), shard_mb: 0.02, ..bench.config(&[&file]) };
        let summary = prepare(&config, &AtomicBool::new(false)).unwrap();
        (summary.written, bench.rows())
    };
    let (written, rows) = run(1);
    assert_eq!(rows.len(), 700);
    assert!(rows[7].starts_with("<user/q7>"));
    assert_eq!(run(5), (written, rows));
}

#[test]
fn limits_shuffles_and_several_sources() {
    let bench = Bench::new(CHATML);
    let row = |i: usize| format!("{}\n", json!({"question": i.to_string(), "answer": "a"}));
    let first = bench.write("first.jsonl", &(0..50).map(row).collect::<String>());
    let second = bench.write("second.jsonl", &(50..60).map(row).collect::<String>());
    let run = |limit: Option<usize>, shuffle_seed: Option<u64>| {
        let config = PrepareSettings { limit, shuffle_seed, ..bench.config(&[&first, &second]) };
        prepare(&config, &AtomicBool::new(false)).unwrap();
        bench.rows()
    };
    let all = run(None, None);
    assert_eq!(all.len(), 60);
    assert!(all[59].starts_with("<user/59>"));
    assert_eq!(run(Some(55), None), all[..55]);
    let drawn = run(Some(20), Some(1));
    assert_eq!(drawn.len(), 20);
    assert_ne!(drawn, all[..20]);
    assert_eq!(run(Some(20), Some(1)), drawn);
    assert!(drawn.iter().all(|row| all.contains(row)));
}

#[test]
fn parquet_files_are_rows_too() {
    let bench = Bench::new(CHATML);
    let schema = "message rows { required binary question (UTF8); required binary answer (UTF8); }";
    let path = bench.path("rows.parquet");
    write_parquet(&path, schema, &[[b"q", b"r"], [b"a", b"b"]]);
    let config = bench.config(&[path.to_str().unwrap()]);
    prepare(&config, &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/[a>]/", "<user/r>/<assistant/[b>]/"]);
    fs::write(&path, "PAR1 not really").unwrap();
    let error = prepare(&config, &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.contains("rows.parquet is not a readable Parquet file"), "{error}");
    // The dataset that was there is still there.
    assert_eq!(bench.rows().len(), 2);
}

#[test]
fn broken_input_is_named_with_its_line() {
    let bench = Bench::new(CHATML);
    let good = r#"{"question": "q", "answer": "a"}"#;
    bench.check_refusal(&format!("{good}\n{{\"question\": \n"), "rows.jsonl:2: not valid JSON");
    bench.check_refusal(&format!("{good}\n\n{{\"text\": 1}}\n"), "rows.jsonl:3: no conversation");
    bench.check_refusal("", "no rows in");
    let file = bench.write("rows.jsonl", &format!("{good}\nbroken\n{{\"text\": 1}}\n"));
    let config = PrepareSettings { skip_bad_rows: true, ..bench.config(&[&file]) };
    let summary = prepare(&config, &AtomicBool::new(false)).unwrap();
    assert!(summary.to_string().contains("2: row not understood (first: "), "{summary}");
}

#[test]
fn a_model_that_cannot_render_is_named() {
    let check = |break_it: &dyn Fn(&Path), expect: &str| {
        let bench = Bench::new(CHATML);
        break_it(&bench.path("model"));
        bench.check_refusal(r#"{"question": "q", "answer": "a"}"#, expect);
    };
    check(&|m| fs::remove_file(m.join("tokenizer.json")).unwrap(), "has no tokenizer.json");
    check(&|m| fs::remove_file(m.join("chat_template.jinja")).unwrap(), "has no chat template");
    check(&|m| fs::write(m.join("chat_template.jinja"), "{% if").unwrap(), "does not parse");
    check(&|m| fs::remove_dir_all(m).unwrap(), "no such directory");
}

#[test]
fn an_occupied_output_is_left_alone() {
    let bench = Bench::new(CHATML);
    fs::create_dir(bench.path("out")).unwrap();
    bench.write("out/notes.txt", "mine");
    let row = r#"{"question": "q", "answer": "a"}"#;
    let file = bench.write("rows.jsonl", row);
    let refused = |overwrite: bool| {
        let config = PrepareSettings { overwrite, ..bench.config(&[&file]) };
        prepare(&config, &AtomicBool::new(false)).unwrap_err().to_string()
    };
    assert!(refused(false).contains("pass --overwrite to replace"));
    assert!(refused(true).contains("holds notes.txt"));
    assert_eq!(fs::read(bench.path("out/notes.txt")).unwrap(), b"mine");
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let bench = Bench::new(CHATML);
    let file = bench.write("rows.jsonl", r#"{"question": "q", "answer": "a"}"#);
    let error = prepare(&bench.config(&[&file]), &AtomicBool::new(true)).unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error}");
    bench.check_clean();
}

#[test]
fn numbers_that_cannot_work_are_refused() {
    let bench = Bench::new(CHATML);
    let config = PrepareSettings { seq_length: 1, ..bench.config(&["gsm8k"]) };
    let error = prepare(&config, &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.starts_with("--seq-length is 1, but"), "{error}");
}

/// Prints tools, reasoning and a custom variable.
const RICH: &str = "{% if tools %}T{{ tools | length }}{% endif %}{{ style }}\
    {% for m in messages %}<|im_start|>{{ m.role[0] }}:{% if m.reasoning_content %}\
    ({{ m.reasoning_content }}){% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}\
    {{ c.function.arguments | tojson }}{% endfor %}{{ m.content or '' }}<|im_end|>{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>a:{% endif %}";

#[test]
fn tools_reasoning_and_variables_reach_the_template() {
    let bench = Bench::new(RICH);
    let row = json!({"tools": "[{\"name\": \"f\"}]", "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "a"}]});
    let file = bench.write("rows.jsonl", &row.to_string());
    let template_variables = json!({"style": "S"}).as_object().unwrap().clone();
    let chat_template_kwargs = Some(template_variables);
    let config = PrepareSettings { chat_template_kwargs, ..bench.config(&[&file]) };
    prepare(&config, &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), ["T1S<u:q><a:[(hm)f{\"x\": 1}>]<t:1><a:[a>]"]);
}

#[test]
fn a_first_turn_by_the_assistant_is_context() {
    let bench = Bench::new(CHATML);
    let row = r#"{"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#;
    bench.prepare(row).unwrap();
    assert_eq!(bench.rows(), ["<assistant/hello>/<user/q>/<assistant/[a>]/"]);
}

#[test]
fn special_tokens_inside_content_do_not_move_the_boundary() {
    let bench = Bench::new(CHATML);
    let row = json!({"question": "a<|im_end|>b", "answer": "<|im_start|>x"});
    bench.prepare(&row.to_string()).unwrap();
    assert_eq!(bench.rows(), ["<user/a>b>/<assistant/[<x>]/"]);
}

#[test]
fn equal_runs_give_equal_files() {
    let bench = Bench::new(CHATML);
    let row = r#"{"question": "q", "answer": "a"}"#;
    let snapshot = || {
        bench.prepare(row).unwrap();
        let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(bench.path("out"))
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                let name = entry.file_name().into_string().unwrap();
                (name, fs::read(entry.path()).unwrap())
            })
            .collect();
        files.sort();
        files
    };
    let first = snapshot();
    let names: Vec<&str> = first.iter().map(|(name, _)| name.as_str()).collect();
    let expect = [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "dflash_prepare.json",
        "state.json",
        "token_freq.json",
        "token_freq.pt",
    ];
    assert_eq!(names, expect);
    assert_eq!(first, snapshot());
}

#[test]
fn token_counts_cover_what_is_supervised() {
    let bench = Bench::new(CHATML);
    bench.prepare("{\"question\": \"zz\", \"answer\": \"aba\"}\n").unwrap();
    let counts: Value =
        serde_json::from_slice(&fs::read(bench.path("out/token_freq.json")).unwrap()).unwrap();
    // a, b and the end of the turn; no z of the question, no line break after the turn.
    assert_eq!(counts, json!({"97": 2, "98": 1, "257": 1}));
}

#[test]
fn short_answers_can_be_left_out() {
    let bench = Bench::new(CHATML);
    let rows = ["a", "long enough"].map(|a| json!({"question": "q", "answer": a}).to_string());
    let file = bench.write("rows.jsonl", &rows.join("\n"));
    let config = PrepareSettings { minimum_valid_tokens: 5, ..bench.config(&[&file]) };
    let summary = prepare(&config, &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/[long enough>]/"]);
    assert!(summary.to_string().contains("1: fewer supervised tokens than --minimum-valid"));
}

#[test]
fn a_directory_of_files_is_read_in_order() {
    let bench = Bench::new(CHATML);
    fs::create_dir_all(bench.path("data/deep")).unwrap();
    let row = |q: &str| json!({"question": q, "answer": "a"}).to_string();
    bench.write("data/b.jsonl", &row("2"));
    bench.write("data/a.json", &format!("[{}]", row("1")));
    bench.write("data/deep/c.ndjson", &row("3"));
    bench.write("data/readme.txt", "not data");
    let config = bench.config(&[bench.path("data").to_str().unwrap()]);
    prepare(&config, &AtomicBool::new(false)).unwrap();
    let questions: Vec<char> = bench.rows().iter().map(|row| row.chars().nth(6).unwrap()).collect();
    assert_eq!(questions, ['1', '2', '3']);
}

/// A fault late in the data, behind several chunks in flight, still takes precedence over earlier
/// output.
#[test]
fn a_late_fault_ends_the_run_without_output() {
    let bench = Bench::new(CHATML);
    let good = json!({"question": "q", "answer": "a"}).to_string();
    let mut lines = vec![good; 1500];
    lines[1200] = "{broken".to_owned();
    bench.check_refusal(&lines.join("\n"), "rows.jsonl:1201: not valid JSON");
    let array = format!("[{}", lines[..1000].join(",\n"));
    let file = bench.write("rows.json", &array);
    let error = prepare(&bench.config(&[&file]), &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.contains("rows.json:1000: the end of the file in a JSON array"), "{error}");
    bench.check_clean();
}
