//! Parity with speculators: the cases of `golden.json` that concern data.
//!
//! The folder is `DFLASH_GOLDEN`, by default `../shared/golden` beside the checkout. Without it
//! the tests say so and pass; with it they run over every case.

use std::path::PathBuf;

use dflash_data::{
    PackedRow, Sample, anchor_candidates, block_positions, select_vocabulary, split_index,
    target_offsets,
};
use serde_json::Value;

/// The cases under `key`, which is a list or an object with a list of `cases`.
fn cases(key: &str) -> Vec<Value> {
    let folder = std::env::var_os("DFLASH_GOLDEN").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden"),
        PathBuf::from,
    );
    let path = folder.join("speculators/golden.json");
    let Ok(text) = std::fs::read(&path) else {
        eprintln!("skipped: {} is not there; set DFLASH_GOLDEN", path.display());
        return Vec::new();
    };
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let section = &golden[key];
    let cases = section.as_array().or_else(|| section["cases"].as_array()).unwrap().clone();
    assert!(!cases.is_empty(), "{key} has no cases");
    cases
}

fn integers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(integer).collect()
}

/// Masks are written as 0/1 or as booleans.
fn integer(value: &Value) -> i64 {
    value.as_i64().or_else(|| value.as_bool().map(i64::from)).unwrap()
}

fn positions(value: &Value) -> Vec<usize> {
    integers(value).into_iter().map(|position| position as usize).collect()
}

fn size(case: &Value, key: &str) -> usize {
    integer(&case[key]) as usize
}

#[test]
fn vocabulary_mapping() {
    for case in cases("vocab_mapping") {
        let frequencies: Vec<(i64, u64)> = case["token_freq"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(id, count)| (id.parse().unwrap(), count.as_u64().unwrap()))
            .collect();
        let target_vocab = size(&case, "target_vocab_size");
        let selected =
            select_vocabulary(&frequencies, size(&case, "draft_vocab_size"), target_vocab);
        assert_eq!(selected, integers(&case["selected"]), "{case}");
        assert_eq!(target_offsets(&selected), integers(&case["d2t_offsets"]), "{case}");
        let kept: Vec<i64> =
            (0..target_vocab as i64).map(|id| i64::from(selected.contains(&id))).collect();
        assert_eq!(kept, integers(&case["t2d"]), "{case}");
    }
}

/// Ours is what is left of theirs without the padding.
#[test]
fn collation() {
    for case in cases("collate") {
        let lengths = positions(&case["lengths"]);
        // The vectors number the tokens of document d from 100 * d.
        let samples: Vec<(u32, Sample)> = (0..)
            .zip(&lengths)
            .map(|(document, &length)| {
                let input_ids = (0..length as i64).map(|i| 100 * i64::from(document) + i).collect();
                (document, Sample { input_ids, loss_mask: vec![true; length] })
            })
            .collect();
        let row = PackedRow::from_samples(&samples, size(&case, "max_len"));
        let tokens = row.input_ids.len();
        let check = |ours: &[i64], key: &str, padding: i64| {
            let theirs = integers(&case[key]);
            assert_eq!(ours, &theirs[..tokens], "{key} of {case}");
            assert!(theirs[tokens..].iter().all(|&value| value == padding), "{key} of {case}");
        };
        check(&row.input_ids, "input_ids", 0);
        check(&row.position_ids(), "position_ids", 0);
        check(&row.document_ids(), "document_ids", -1);
        let mask: Vec<i64> =
            row.loss_mask.iter().map(|&supervised| i64::from(supervised)).collect();
        check(&mask, "loss_mask", 0);
    }
}

#[test]
fn positions_of_blocks() {
    for case in cases("block_indices") {
        let anchors = positions(&case["anchors"]);
        let found = block_positions(&anchors, size(&case, "block_size"));
        assert_eq!(found, positions(&case["indices"]), "{case}");
    }
}

/// The rules differ on purpose: theirs leaves out the last block of a row, ours positions whose
/// next token is not supervised. Where neither applies they must agree.
#[test]
fn anchor_rules_agree_where_they_overlap() {
    for case in cases("anchor_candidates") {
        let loss_mask: Vec<bool> =
            integers(&case["loss_mask"]).into_iter().map(|value| value != 0).collect();
        let end = size(&case, "T") - size(&case, "block_size");
        let theirs: Vec<usize> = positions(&case["candidate_positions"])
            .into_iter()
            .filter(|&position| loss_mask[position + 1])
            .collect();
        let sample = Sample { input_ids: vec![0; loss_mask.len()], loss_mask };
        let row = PackedRow::from_samples(&[(0, sample)], usize::MAX);
        let ours: Vec<usize> =
            anchor_candidates(&row).into_iter().filter(|&position| position < end).collect();
        assert_eq!(ours, theirs, "{case}");
    }
}

#[test]
fn splits() {
    for case in cases("train_val_split") {
        let ratio = case["ratio"].as_f64().unwrap();
        assert_eq!(split_index(size(&case, "n"), ratio), size(&case, "split"), "{case}");
    }
}
