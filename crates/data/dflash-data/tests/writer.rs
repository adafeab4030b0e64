//! Datasets produced by the writer: content, names, counts, refusals.

use std::fs;
use std::path::Path;

use dflash_data::{Dataset, DatasetWriter, Error, Sample, WriteSummary, WriterOptions};

fn sample(length: usize) -> Sample {
    Sample {
        input_ids: (0..length as i64).map(|i| i * 7 % 100).collect(),
        loss_mask: (0..length).map(|i| i % 3 > 0).collect(),
    }
}

fn write(dir: &Path, options: WriterOptions, lengths: &[usize]) -> Result<WriteSummary, Error> {
    let mut writer = DatasetWriter::create(dir, options)?;
    for &length in lengths {
        writer.push(&sample(length))?;
    }
    writer.finish()
}

#[test]
fn rows_come_back_as_they_went_in() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let lengths: Vec<usize> = (0..2500).map(|i| i * 13 % 50).collect();
    // 1,000 rows of 24.5 tokens are 294 KB, so every batch is a separate shard.
    let options = WriterOptions { shard_bytes: 100_000, ..WriterOptions::default() };
    let summary = write(&dir, options, &lengths).unwrap();
    assert_eq!((summary.rows, summary.shards), (2500, 3));
    assert_eq!(summary.tokens, lengths.iter().sum::<usize>() as u64);
    assert!(dir.join("data-00002-of-00003.arrow").is_file());

    let dataset = Dataset::open(&dir).unwrap();
    assert_eq!(dataset.len(), 2500);
    for (index, &length) in lengths.iter().enumerate() {
        assert_eq!(dataset.lengths()[index] as usize, length);
        assert_eq!(dataset.get(index).unwrap(), sample(length), "row {index}");
    }
    assert!(matches!(dataset.get(2500), Err(Error::RowRange { row: 2500, rows: 2500 })));
    let counts = dataset.token_frequencies().unwrap();
    assert_eq!(counts.iter().map(|(_, n)| n).sum::<u64>(), summary.supervised_tokens);
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join("token_freq.json")).unwrap()).unwrap();
    assert_eq!(json[counts[5].0.to_string()], counts[5].1);
}

#[test]
fn counts_are_read_where_they_are_stored_and_else_counted() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    write(&dir, WriterOptions::default(), &[30, 40]).unwrap();
    let frequencies = || Dataset::open(&dir).unwrap().token_frequencies();
    let stored = frequencies().unwrap();
    fs::write(dir.join("token_freq.json"), r#"{"11": 2, "7": 5}"#).unwrap();
    assert_eq!(frequencies().unwrap(), [(7, 5), (11, 2)]);
    fs::write(dir.join("token_freq.json"), r#"{"7": "#).unwrap();
    let refused = frequencies().unwrap_err().to_string();
    assert!(refused.contains("token_freq.json is not valid JSON"), "{refused}");
    fs::remove_file(dir.join("token_freq.json")).unwrap();
    assert_eq!(frequencies().unwrap(), stored);
}

#[test]
fn the_fingerprint_is_of_the_content() {
    let root = tempfile::tempdir().unwrap();
    let fingerprint = |name: &str, shard_bytes: u64, lengths: &[usize]| {
        let dir = root.path().join(name);
        let options = WriterOptions { shard_bytes, overwrite: false };
        let written = write(&dir, options, lengths).unwrap().fingerprint;
        (written, Dataset::open(&dir).unwrap().fingerprint())
    };
    let first = fingerprint("a", 1, &[3, 4]);
    assert_eq!(first, fingerprint("b", 1 << 30, &[3, 4]));
    assert_ne!(first, fingerprint("c", 1, &[4, 3]));
}

#[test]
fn an_unfinished_dataset_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let mut writer = DatasetWriter::create(&dir, WriterOptions::default()).unwrap();
    writer.push(&sample(5)).unwrap();
    drop(writer);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn only_a_dataset_is_overwritten_and_only_when_asked() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let replace = WriterOptions { overwrite: true, ..WriterOptions::default() };
    write(&dir, replace, &[3]).unwrap();
    let refused = write(&dir, WriterOptions::default(), &[4]).unwrap_err().to_string();
    assert!(refused.contains("exists and is not empty"), "{refused}");
    write(&dir, replace, &[4, 5]).unwrap();
    assert_eq!(Dataset::open(&dir).unwrap().lengths(), [4, 5]);
    fs::write(dir.join("thesis.tex"), "").unwrap();
    let refused = write(&dir, replace, &[6]).unwrap_err().to_string();
    assert!(refused.contains("holds thesis.tex"), "{refused}");
    assert_eq!(Dataset::open(&dir).unwrap().lengths(), [4, 5]);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
}

#[test]
fn impossible_rows_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let mut writer =
        DatasetWriter::create(&root.path().join("data"), WriterOptions::default()).unwrap();
    let row = |ids: &[i64]| Sample { input_ids: ids.to_vec(), loss_mask: vec![true] };
    let error = writer.push(&row(&[1, 2])).unwrap_err();
    // The name that the user gave, not that of the temporary directory.
    let named = |error: &Error| matches!(error, Error::MaskLength { row: 0, path, .. } if *path == root.path().join("data"));
    assert!(named(&error), "{error}");
    assert!(matches!(writer.push(&row(&[-1])), Err(Error::TokenId { id: -1, .. })));
    assert!(matches!(writer.push(&row(&[1 << 31])), Err(Error::TokenId { .. })));
}

#[test]
fn a_damaged_directory_is_named() {
    let root = tempfile::tempdir().unwrap();
    let check = |dir: &Path, expect: &str| {
        let error = Dataset::open(dir).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check(&root.path().join("nowhere"), "the directory is missing");
    check(root.path(), "state.json is missing");
    let dir = root.path().join("data");
    write(&dir, WriterOptions::default(), &[30, 40]).unwrap();
    let shard = dir.join("data-00000-of-00001.arrow");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    check(&dir, "ends inside a record batch");
    fs::write(&shard, "no arrow").unwrap();
    check(&dir, "is not a complete Arrow stream file");
    fs::remove_file(&shard).unwrap();
    check(&dir, "cannot read");
    fs::write(dir.join("state.json"), "{").unwrap();
    check(&dir, "is not valid JSON");
}
