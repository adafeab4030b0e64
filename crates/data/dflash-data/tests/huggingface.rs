//! Datasets written by Hugging Face (see `huggingface/make.py`), and ours in Arrow's reader.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow_array::Array;
use arrow_array::cast::AsArray;
use arrow_array::types::{Int32Type, Int64Type};
use arrow_ipc::reader::StreamReader;
use dflash_data::{Dataset, DatasetWriter, Error, Sample, WriterOptions};

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/huggingface").join(name)
}

fn sample(ids: &[i64], mask: &[u8]) -> Sample {
    Sample { input_ids: ids.to_vec(), loss_mask: mask.iter().map(|&m| m == 1).collect() }
}

#[test]
fn wide_lists_and_booleans_among_other_columns() {
    let dataset = Dataset::open(&folder("mixed")).unwrap();
    let rows: Vec<Sample> = (0..dataset.len()).map(|row| dataset.get(row).unwrap()).collect();
    let expect =
        [sample(&[1, 2, 3], &[0, 1, 1]), sample(&[4], &[1]), sample(&[5, 600_000], &[0, 1])];
    assert_eq!(rows, expect);
    assert_eq!(dataset.lengths(), [3, 1, 2]);
    assert_eq!(dataset.token_frequencies().unwrap(), [(2, 1), (3, 1), (4, 1), (600_000, 1)]);
}

#[test]
fn shards_of_a_selection_with_empty_rows() {
    let dataset = Dataset::open(&folder("cut")).unwrap();
    assert_eq!(dataset.len(), 20);
    for row in 0..20_i64 {
        let index = row + 10;
        let rest: Vec<i64> = (0..index % 5).collect();
        let expect = match rest.is_empty() {
            true => sample(&[], &[]),
            false => Sample {
                input_ids: std::iter::once(index).chain(rest.iter().copied()).collect(),
                loss_mask: std::iter::once(true).chain(rest.iter().map(|v| v % 2 == 1)).collect(),
            },
        };
        assert_eq!(dataset.get(row as usize).unwrap(), expect, "row {row}");
    }
}

#[test]
fn a_directory_of_splits_says_to_pass_one() {
    let error = Dataset::open(&folder("splits")).unwrap_err();
    assert!(matches!(error, Error::SeveralSplits { .. }), "{error}");
    let error = Dataset::open(&folder("splits/train")).unwrap_err().to_string();
    assert!(error.contains("has no column loss_mask; its columns are [input_ids]"), "{error}");
}

/// The rows of a shard as Arrow's reader sees them.
fn read_with_arrow(shard: &Path) -> Vec<(Vec<i32>, Vec<i64>, i64)> {
    let reader = StreamReader::try_new(File::open(shard).unwrap(), None).unwrap();
    let features: serde_json::Value =
        serde_json::from_str(&reader.schema().metadata()["huggingface"]).unwrap();
    assert_eq!(features["info"]["features"]["seq_len"]["dtype"], "int64");
    let mut rows = Vec::new();
    for batch in reader {
        let batch = batch.unwrap();
        let column = |name: &str| batch.column_by_name(name).unwrap().clone();
        let (ids, mask) = (column("input_ids"), column("loss_mask"));
        let lengths = column("seq_len");
        for row in 0..batch.num_rows() {
            let ids = ids.as_list::<i32>().value(row);
            let mask = mask.as_list::<i32>().value(row);
            rows.push((
                ids.as_primitive::<Int32Type>().values().to_vec(),
                mask.as_primitive::<Int64Type>().values().to_vec(),
                lengths.as_primitive::<Int64Type>().value(row),
            ));
        }
        assert_eq!(lengths.null_count(), 0);
    }
    rows
}

#[test]
fn our_shards_are_plain_arrow_streams() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let mut writer = DatasetWriter::create(&dir, WriterOptions::default()).unwrap();
    writer.push(&sample(&[7, 8], &[0, 1])).unwrap();
    writer.push(&sample(&[9], &[1])).unwrap();
    writer.finish().unwrap();
    assert_eq!(
        read_with_arrow(&dir.join("data-00000-of-00001.arrow")),
        [(vec![7, 8], vec![0, 1], 2), (vec![9], vec![1], 1)]
    );
}
