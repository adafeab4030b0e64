//! Files as users have them: compressed, in folders with other things, in other encodings.

use std::fs;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_prepare::prepare;
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use super::{Bench, CHATML};

const ROW: &str = r#"{"question": "q", "answer": "a"}"#;
const PREPARED: &str = "<user/q>/<assistant/[a>]/";

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_text_is_read_whatever_its_name_says() {
    let bench = Bench::new(CHATML);
    let text = format!("{ROW}\n{ROW}\n");
    let zstandard = zstd::encode_all(text.as_bytes(), 1).unwrap();
    // Two parts, as parallel compressors write them.
    let parts = [gzip(&text), gzip(ROW)].concat();
    // pzstd's: each part behind a frame that says how long it is.
    let sizes = [b"\x50\x2a\x4d\x18\x04\0\0\0abcd", &zstandard[..]].concat();
    for (name, bytes, rows) in [
        ("rows.jsonl.gz", gzip(&text), 2),
        ("parts.jsonl.gz", parts, 3),
        ("array.json.gz", gzip(&format!("[{ROW},\n{ROW}]")), 2),
        ("sizes.jsonl.zst", [&sizes[..], &sizes].concat(), 4),
        ("rows.jsonl.zst", zstandard, 2),
        ("disguised.jsonl", gzip(&text), 2),
        ("UPPER.JSONL", text.clone().into_bytes(), 2),
    ] {
        let path = bench.path(name);
        fs::write(&path, bytes).unwrap();
        prepare(&bench.config(&[path.to_str().unwrap()]), &AtomicBool::new(false)).unwrap();
        assert_eq!(bench.rows(), vec![PREPARED; rows], "{name}");
    }
    // A file that ends early is an error, not fewer rows.
    let cut = bench.path("cut.jsonl.gz");
    let long: String = (0..20_000).map(|i| ROW.replace("q\"", &format!("q{i}\"")) + "\n").collect();
    let whole = gzip(&long);
    fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let error = prepare(&bench.config(&[cut.to_str().unwrap()]), &AtomicBool::new(false));
    let error = error.unwrap_err();
    assert!(error.to_string().contains("cut.jsonl.gz"), "{error}");
}

#[test]
fn parquet_is_read_in_every_usual_compression() {
    use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
    let bench = Bench::new(CHATML);
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::BROTLI(BrotliLevel::default()),
        Compression::LZ4_RAW,
        Compression::ZSTD(ZstdLevel::default()),
    ] {
        let path = bench.path("rows.parquet");
        let schema =
            "message rows { required binary question (UTF8); required binary answer (UTF8); }";
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = fs::File::create(&path).unwrap();
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
        let mut rows = writer.next_row_group().unwrap();
        for value in ["q", "a"] {
            let mut column = rows.next_column().unwrap().unwrap();
            let value = [ByteArray::from(value)];
            column.typed::<ByteArrayType>().write_batch(&value, None, None).unwrap();
            column.close().unwrap();
        }
        rows.close().unwrap();
        writer.close().unwrap();
        prepare(&bench.config(&[path.to_str().unwrap()]), &AtomicBool::new(false)).unwrap();
        assert_eq!(bench.rows(), [PREPARED], "{compression:?}");
    }
}

#[test]
fn a_folder_gives_its_data_and_nothing_else() {
    let bench = Bench::new(CHATML);
    let folder = bench.path("folder");
    for dir in ["part", ".git", ".cache"] {
        fs::create_dir_all(folder.join(dir)).unwrap();
    }
    for name in ["a.jsonl", "part/b.jsonl.gz", ".hidden.jsonl", ".git/c.jsonl", ".cache/d.json"] {
        let bytes = if name.ends_with("gz") { gzip(ROW) } else { ROW.as_bytes().to_vec() };
        fs::write(folder.join(name), bytes).unwrap();
    }
    for name in ["dataset_dict.json", "METADATA.JSON", "part/dataset_info.json"] {
        fs::write(folder.join(name), r#"{"splits": ["train"]}"#).unwrap();
    }
    fs::write(folder.join("config.json.gz"), gzip("{}")).unwrap();
    // Reading a pipe would wait for ever.
    let pipe = std::process::Command::new("mkfifo").arg(folder.join("pipe.jsonl")).status();
    assert!(pipe.unwrap().success());
    // A link to where the walk is leads round and round; one to another folder is followed.
    std::os::unix::fs::symlink(&folder, folder.join("part/round")).unwrap();
    fs::create_dir(bench.path("elsewhere")).unwrap();
    fs::write(bench.path("elsewhere/e.jsonl"), ROW).unwrap();
    std::os::unix::fs::symlink(bench.path("elsewhere"), folder.join("linked")).unwrap();
    let config = bench.config(&[folder.to_str().unwrap()]);
    prepare(&config, &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), [PREPARED; 3]);
}

#[test]
fn utf_16_is_named_with_the_way_out() {
    let bench = Bench::new(CHATML);
    for (name, start) in [("marked.jsonl", Some(0xfeff)), ("plain.jsonl", None)] {
        let letters = start.into_iter().chain(ROW.encode_utf16());
        let bytes: Vec<u8> = letters.flat_map(u16::to_le_bytes).collect();
        let path = bench.path(name);
        fs::write(&path, bytes).unwrap();
        let error = prepare(&bench.config(&[path.to_str().unwrap()]), &AtomicBool::new(false));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("is encoded in UTF-16; convert it: iconv -f UTF-16"), "{error}");
        assert!(error.ends_with(&name.replace(".jsonl", ".utf8.jsonl")), "{error}");
    }
}

#[test]
fn keys_that_a_column_has_for_other_rows_are_not_printed() {
    let bench = Bench::new(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson \
         if m.tool_calls else '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}\
         <|im_start|>assistant\n{% endif %}",
    );
    let schema = "message rows { required group messages (LIST) { repeated group list {
        required group element { required binary role (UTF8); required binary content (UTF8);
            optional group tool_calls (LIST) { repeated group list { required group element {
                required binary name (UTF8); optional binary to (UTF8); } } } } } } }";
    let path = bench.path("rows.parquet");
    let file = fs::File::create(&path).unwrap();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
    let mut rows = writer.next_row_group().unwrap();
    // role, content, tool_calls.name, tool_calls.to: the first turn has no calls, and the only call
    // has no `to`.
    let columns: [(&[&str], &[i16], &[i16]); 4] = [
        (&["user", "assistant"], &[1, 1], &[0, 1]),
        (&["q", "a"], &[1, 1], &[0, 1]),
        (&["f"], &[1, 3], &[0, 1]),
        (&[], &[1, 3], &[0, 1]),
    ];
    for (values, definitions, repetitions) in columns {
        let mut column = rows.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = values.iter().map(|&value| ByteArray::from(value)).collect();
        let typed = column.typed::<ByteArrayType>();
        typed.write_batch(&values, Some(definitions), Some(repetitions)).unwrap();
        column.close().unwrap();
    }
    rows.close().unwrap();
    writer.close().unwrap();
    prepare(&bench.config(&[path.to_str().unwrap()]), &AtomicBool::new(false)).unwrap();
    assert_eq!(bench.rows(), [r#"<user/q>/<assistant/[a[{"name": "f"}]>]/"#]);
}

#[test]
fn turns_of_weight_0_are_context() {
    let bench = Bench::new(CHATML);
    let turns = r#"[{"role": "User", "content": "q"},
        {"role": "assistant", "content": "a", "weight": 0}, {"role": "user", "content": "s"},
        {"role": "Assistant", "content": "b", "weight": 1}]"#;
    let row = format!(r#"{{"messages": {turns}}}"#).replace('\n', " ");
    let summary = bench.prepare(&row).unwrap().to_string();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/a>/<user/s>/<assistant/[b>]/"]);
    assert!(!summary.contains("unknown keys"), "{summary}");
    // The list as a string of JSON, as some Parquet files have it.
    let text = serde_json::json!({"messages": turns}).to_string();
    bench.prepare(&text).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/a>/<user/s>/<assistant/[b>]/"]);
    fs::remove_dir_all(bench.path("out")).unwrap();
    bench.check_refusal(&row.replace("\"weight\": 1", "\"weight\": 0.5"), "weight must be 0 or 1");
}
