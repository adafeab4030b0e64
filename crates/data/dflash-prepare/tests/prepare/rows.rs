//! Which parts of a row reach the prompt, what is counted, and what is recorded about the origin of
//! rows.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_data::{DatasetWriter, WriterOptions};
use dflash_prepare::prepare;
use dflash_settings::PrepareSettings;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

use super::{Bench, CHATML, marked};

/// Writes a Parquet file of two rows.
pub(crate) fn write_parquet(path: &Path, schema: &str, columns: &[[&[u8]; 2]]) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
    let mut rows = writer.next_row_group().unwrap();
    for values in columns {
        let mut column = rows.next_column().unwrap().unwrap();
        let values = values.map(|value| ByteArray::from(value.to_vec()));
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    rows.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn text_of_parquet_files_may_be_bytes_without_a_type() {
    let bench = Bench::new(CHATML);
    let schema = "message rows {
        required binary question; required binary answer; required binary image; }";
    let path = bench.path("rows.parquet");
    let mut config = bench.config(&[path.to_str().unwrap()]);
    let image: [&[u8]; 2] = [b"\xff\xd8", b"\xff\xd9"];
    write_parquet(&path, schema, &[[b"q", "\u{e9}".as_bytes()], [b"a", b"b"], image]);
    let summary = prepare(&config, &AtomicBool::new(false)).unwrap().to_string();
    let rows = ["<user/q>/<assistant/[a>]/", "<user/\u{e9}>/<assistant/[b>]/"];
    // Each byte is a token, and shown as a character.
    let shown = |row: &str| row.replace('\u{e9}', "\u{c3}\u{a9}");
    let found: Vec<String> = bench.rows();
    assert!(found == rows || found == rows.map(shown), "{found:?}");
    assert!(summary.contains("unread columns     image (2 rows)"), "{summary}");

    write_parquet(&path, schema, &[[b"q", b"\xff\xfe"], [b"a", b"b"], image]);
    let error = prepare(&config, &AtomicBool::new(false)).unwrap_err().to_string();
    let told = "rows.parquet:2: column question holds bytes that are not UTF-8 text; fix";
    assert!(error.contains(told), "{error}");
    config.skip_bad_rows = true;
    prepare(&config, &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/[a>]/"]);
}

#[test]
fn bytes_inside_lists_and_structs_are_text_too() {
    let bench = Bench::new(CHATML);
    let schema = "message rows { required group messages (LIST) { repeated group list {
        required group element { required binary role; required binary content; } } } }";
    let path = bench.path("rows.parquet");
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
    let mut rows = writer.next_row_group().unwrap();
    for values in [["user", "assistant"], ["q", "a"]] {
        let mut column = rows.next_column().unwrap().unwrap();
        let values = values.map(ByteArray::from);
        let typed = column.typed::<ByteArrayType>();
        typed.write_batch(&values, Some(&[1, 1]), Some(&[0, 1])).unwrap();
        column.close().unwrap();
    }
    rows.close().unwrap();
    writer.close().unwrap();
    prepare(&bench.config(&[path.to_str().unwrap()]), &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/[a>]/"]);
}

#[test]
fn columns_of_the_prompt_are_taken_and_others_are_counted() {
    let bench = Bench::new(CHATML);
    let rows = [
        json!({"id": "niv.1", "system_prompt": "s", "question": "q", "response": "a"}),
        json!({"instruction": "q", "context": "c", "response": "a", "category": "closed_qa"}),
        json!({"question": "q", "context": "c", "answer": "a"}),
        json!({"system": "t", "messages": [{"role": "system", "content": "s"},
            {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
    ];
    let text: Vec<String> = rows.iter().map(Value::to_string).collect();
    let summary = bench.prepare(&text.join("\n")).unwrap().to_string();
    assert_eq!(
        bench.rows(),
        [
            "<system/s>/<user/q>/<assistant/[a>]/",
            "<user/q/c>/<assistant/[a>]/",
            "<user/q>/<assistant/[a>]/",
            "<system/s>/<user/q>/<assistant/[a>]/"
        ]
    );
    let told = "unread columns     category (1 row), context (1 row), id (1 row), system (1 row)\n";
    assert!(summary.contains(told), "{summary}");
    let text = fs::read(bench.path("out/dflash_prepare.json")).unwrap();
    let provenance: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(
        provenance["unread_columns"],
        json!({"category": 1, "context": 1, "id": 1, "system": 1})
    );
}

#[test]
fn a_template_for_tools_in_a_file_of_its_own_is_taken() {
    let bench = Bench::new(CHATML);
    let more = bench.path("model/additional_chat_templates");
    fs::create_dir(&more).unwrap();
    fs::write(more.join("tool_use.jinja"), format!("TOOLS {CHATML}")).unwrap();
    let with = json!({"question": "q", "answer": "a", "tools": [{"name": "f"}]});
    let without = json!({"question": "q", "answer": "a"});
    bench.prepare(&format!("{with}\n{without}")).unwrap();
    assert_eq!(bench.rows(), ["TOOLS <user/q>/<assistant/[a>]/", "<user/q>/<assistant/[a>]/"]);
}

#[test]
fn the_rows_of_each_source_are_recorded_where_they_stay_together() {
    let bench = Bench::new(CHATML);
    let rows = |count: usize| "{\"question\": \"q\", \"answer\": \"a\"}\n".repeat(count);
    let (first, second) = (bench.write("a.jsonl", &rows(70)), bench.write("b.jsonl", &rows(5)));
    let recorded = |shuffle_seed: Option<u64>| {
        let config = PrepareSettings { shuffle_seed, ..bench.config(&[&first, &second]) };
        prepare(&config, &AtomicBool::new(false)).unwrap();
        let text = fs::read(bench.path("out/dflash_prepare.json")).unwrap();
        let provenance: Value = serde_json::from_slice(&text).unwrap();
        [0, 1].map(|source| provenance["sources"][source]["rows"].clone())
    };
    assert_eq!(recorded(None), [json!(70), json!(5)]);
    assert_eq!(recorded(Some(1)), [Value::Null, Value::Null]);
}

#[test]
fn a_run_finds_at_its_start_that_another_writes_to_its_output() {
    let bench = Bench::new(CHATML);
    let file = bench.write("rows.jsonl", "{\"question\": \"q\", \"answer\": \"a\"}\n");
    let output = bench.path("ds.v1");
    let config = |overwrite| PrepareSettings {
        output: Some(output.clone()),
        overwrite,
        // It is no longer looked up.
        target: Some("/nonexistent".to_owned()),
        ..bench.config(&[&file])
    };
    let other = DatasetWriter::create(&output, WriterOptions::default());
    for overwrite in [false, true] {
        let refused = prepare(&config(overwrite), &AtomicBool::new(false)).unwrap_err().to_string();
        assert!(refused.contains("ds.v1 is being written by another process"), "{refused}");
    }
    drop(other);
    // A killed run's leftovers are removed, and its neighbour's stay.
    let left = bench.path(&format!(".ds.v1.{}-0.tmp", u32::MAX));
    let neighbour = bench.path(&format!(".ds.{}-0.tmp", u32::MAX));
    for dir in [&left, &neighbour] {
        fs::create_dir(dir).unwrap();
        fs::write(dir.join("data-00000.arrow"), "x").unwrap();
    }
    let config = PrepareSettings { target: bench.config(&[]).target, ..config(true) };
    for _ in 0..2 {
        prepare(&config, &AtomicBool::new(false)).unwrap();
    }
    assert!(!left.exists() && neighbour.exists());
    assert_eq!(marked(&output).len(), 1);
}
