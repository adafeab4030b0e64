//! Datasets of unusual shapes: other column types, faults inside shards, sizes, threads.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{
    BooleanBuilder, Float32Builder, Int8Builder, Int64Builder, ListBuilder, UInt16Builder,
};
use arrow_array::{ArrayRef, NullArray, RecordBatch, StructArray};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field};
use dflash_data::{
    AnchorOptions, Dataset, DatasetWriter, Error, PackedRow, Sample, WriterOptions, epoch_order,
    pack_rows, sample_anchors,
};

/// A dataset directory with one shard that holds `batches`.
fn write_raw(dir: &Path, batches: &[RecordBatch]) {
    fs::create_dir_all(dir).unwrap();
    let state = r#"{"_data_files": [{"filename": "x.arrow"}], "_fingerprint": "f"}"#;
    fs::write(dir.join("state.json"), state).unwrap();
    let file = File::create(dir.join("x.arrow")).unwrap();
    let mut writer = StreamWriter::try_new(file, &batches[0].schema()).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.finish().unwrap();
}

macro_rules! list {
    ($builder:ty, $rows:expr) => {{
        let mut list = ListBuilder::new(<$builder>::new());
        for row in $rows {
            for &value in row.iter() {
                list.values().append_value(value);
            }
            list.append(true);
        }
        Arc::new(list.finish()) as ArrayRef
    }};
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter(columns).unwrap()
}

fn open_raw(columns: Vec<(&str, ArrayRef)>) -> Result<Dataset, Error> {
    let root = tempfile::tempdir().unwrap();
    write_raw(root.path(), &[batch(columns)]);
    Dataset::open(root.path())
}

fn check_fault(columns: Vec<(&str, ArrayRef)>, expect: &str) {
    let error = open_raw(columns).unwrap_err().to_string();
    assert!(error.contains(expect), "{error}");
}

#[test]
fn small_integers_and_columns_to_skip() {
    let root = tempfile::tempdir().unwrap();
    let nothing: ArrayRef = Arc::new(NullArray::new(2));
    let flags = list!(BooleanBuilder, [[true].as_slice(), &[]]);
    let inner = Arc::new(Field::new("flags", flags.data_type().clone(), true));
    let nested: ArrayRef = Arc::new(StructArray::from(vec![(inner, flags)]));
    let columns = || {
        vec![
            ("nothing", nothing.clone()),
            ("nested", nested.clone()),
            ("loss_mask", list!(Int8Builder, [[0, 1].as_slice(), &[1]])),
            ("input_ids", list!(UInt16Builder, [[7, 65_535].as_slice(), &[9]])),
        ]
    };
    // The second batch checks that offsets are relative to each batch's own body.
    write_raw(root.path(), &[batch(columns()), batch(columns())]);
    let dataset = Dataset::open(root.path()).unwrap();
    assert_eq!(dataset.lengths(), [2, 1, 2, 1]);
    for first in [0, 2] {
        let row = dataset.get(first).unwrap();
        assert_eq!((row.input_ids, row.loss_mask), (vec![7, 65_535], vec![false, true]));
        assert_eq!(dataset.get(first + 1).unwrap().input_ids, [9]);
    }
}

#[test]
fn columns_that_do_not_fit_are_named() {
    let ids = || list!(Int64Builder, [[1_i64, 2].as_slice()]);
    let floats = list!(Float32Builder, [[0.0_f32, 1.0].as_slice()]);
    check_fault(
        vec![("input_ids", ids()), ("loss_mask", floats)],
        "column loss_mask must be a list of integers or booleans, found List(",
    );
    let short = list!(Int64Builder, [[1_i64].as_slice()]);
    check_fault(
        vec![("input_ids", ids()), ("loss_mask", short)],
        "row 0 has 2 input_ids but 1 loss_mask entries",
    );
    check_fault(vec![("tokens", ids())], "no column input_ids; its columns are [tokens]");

    let mut holes = ListBuilder::new(Int64Builder::new());
    holes.values().append_null();
    holes.values().append_value(1);
    holes.append(true);
    let holes: ArrayRef = Arc::new(holes.finish());
    check_fault(vec![("input_ids", holes), ("loss_mask", ids())], "input_ids has null entries");
}

#[test]
fn a_state_without_files_is_named() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("state.json"), r#"{"_data_files": []}"#).unwrap();
    let error = Dataset::open(root.path()).unwrap_err().to_string();
    assert!(error.contains("lists no data files"), "{error}");
}

#[test]
fn a_dataset_without_rows_can_be_opened() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("empty");
    let summary = DatasetWriter::create(&dir, WriterOptions::default()).unwrap().finish().unwrap();
    assert_eq!((summary.rows, summary.shards), (0, 1));
    let dataset = Dataset::open(&dir).unwrap();
    assert!(dataset.is_empty());
    assert!(matches!(dataset.get(0), Err(Error::RowRange { row: 0, rows: 0 })));
}

#[test]
fn long_rows_make_batches_of_their_own() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("long");
    let mut writer = DatasetWriter::create(&dir, WriterOptions::default()).unwrap();
    let row = |first: i64| Sample {
        input_ids: (first..first + 700_000).collect(),
        loss_mask: (0..700_000).map(|i| i % 2 == 0).collect(),
    };
    for first in 0..3 {
        writer.push(&row(first)).unwrap();
    }
    let written = writer.so_far();
    assert_eq!((written.rows, written.tokens), (3, 2_100_000));
    assert_eq!(written.supervised_tokens, 1_050_000);
    writer.finish().unwrap();
    let dataset = Dataset::open(&dir).unwrap();
    assert_eq!(dataset.get(2).unwrap(), row(2));
    assert_eq!(dataset.lengths(), [700_000; 3]);
}

#[test]
fn threads_share_a_reader() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("shared");
    let mut writer = DatasetWriter::create(&dir, WriterOptions::default()).unwrap();
    let row = |i: i64| Sample {
        input_ids: vec![i; 3 + i as usize % 5],
        loss_mask: vec![true; 3 + i as usize % 5],
    };
    (0..300).for_each(|i| writer.push(&row(i)).unwrap());
    writer.finish().unwrap();
    let dataset = Dataset::open(&dir).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (dataset, row) = (&dataset, &row);
            scope.spawn(move || {
                for index in epoch_order(300, thread, 0) {
                    assert_eq!(dataset.get(index as usize).unwrap(), row(i64::from(index)));
                }
            });
        }
    });
}

/// The steps of a training epoch as a trainer runs them, from a directory to anchors.
#[test]
fn an_epoch_from_disk_to_anchors() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("epoch");
    let mut writer = DatasetWriter::create(&dir, WriterOptions::default()).unwrap();
    for i in 0..50_usize {
        let length = 10 + i * 7 % 40;
        let loss_mask = (0..length).map(|position| position >= length / 2).collect();
        writer.push(&Sample { input_ids: vec![i as i64; length], loss_mask }).unwrap();
    }
    writer.finish().unwrap();
    let dataset = Dataset::open(&dir).unwrap();
    let mut seen = vec![0; 50];
    for samples in pack_rows(&epoch_order(50, 1, 2), dataset.lengths(), 64) {
        let loaded: Vec<(u32, Sample)> =
            samples.iter().map(|&i| (i, dataset.get(i as usize).unwrap())).collect();
        let row = PackedRow::from_samples(&loaded, 64);
        assert!(row.input_ids.len() <= 64);
        assert_eq!(row.samples, samples);
        let options = AnchorOptions { per_document: 4, per_row: 6, seed: 1, epoch: 2 };
        let anchors = sample_anchors(&row, &options);
        assert!(!anchors.is_empty() && anchors.len() <= 6);
        for anchor in anchors {
            assert!(row.loss_mask[anchor] && row.loss_mask[anchor + 1]);
            assert_eq!(row.input_ids[anchor], row.input_ids[anchor + 1], "across documents");
        }
        samples.iter().for_each(|&i| seen[i as usize] += 1);
    }
    assert_eq!(seen, [1; 50]);
}

/// Guards the match over Arrow's types: a list of lists is not a list of integers.
#[test]
fn nested_lists_are_refused() {
    let inner = DataType::List(Arc::new(Field::new("item", DataType::Int64, true)));
    let outer =
        arrow_array::new_empty_array(&DataType::List(Arc::new(Field::new("item", inner, true))));
    let mask = list!(Int8Builder, Vec::<Vec<i8>>::new());
    check_fault(vec![("input_ids", outer), ("loss_mask", mask)], "column input_ids must be a list");
}
