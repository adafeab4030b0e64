//! Parity with speculators: the rules that concern data, over every case there is.

use dflash_data::{PackedRow, Sample, anchor_candidates, select_vocabulary, split_index};
use dflash_golden::{Case, rule_trials};
use libtest_mimic::Arguments;
use serde_json::Value;

fn main() {
    let trials = rule_trials(
        env!("CARGO_PKG_NAME"),
        &[
            ("vocab_mapping", vocabulary_mapping),
            ("collate", collation),
            ("anchor_candidates", anchor_rules_agree_where_they_overlap),
            ("train_val_split", split),
        ],
    );
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
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

fn vocabulary_mapping(Case { value: case, .. }: &Case) {
    let frequencies: Vec<(i64, u64)> = case["token_freq"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(id, count)| (id.parse().unwrap(), count.as_u64().unwrap()))
        .collect();
    let target_vocab = size(case, "target_vocab_size");
    let selected = select_vocabulary(&frequencies, size(case, "draft_vocab_size"), target_vocab);
    assert_eq!(selected, integers(&case["selected"]));
    let kept: Vec<i64> =
        (0..target_vocab as i64).map(|id| i64::from(selected.contains(&id))).collect();
    assert_eq!(kept, integers(&case["t2d"]));
}

/// Our result must equal theirs without the padding.
fn collation(Case { value: case, .. }: &Case) {
    let lengths = positions(&case["lengths"]);
    // The vectors number the tokens of document d from 100 * d.
    let samples: Vec<(u32, Sample)> = (0..)
        .zip(&lengths)
        .map(|(document, &length)| {
            let input_ids = (0..length as i64).map(|i| 100 * i64::from(document) + i).collect();
            (document, Sample { input_ids, loss_mask: vec![true; length] })
        })
        .collect();
    let row = PackedRow::from_samples(&samples, size(case, "max_len"));
    let tokens = row.input_ids.len();
    let check = |ours: &[i64], key: &str, padding: i64| {
        let theirs = integers(&case[key]);
        assert_eq!(ours, &theirs[..tokens], "{key}");
        assert!(theirs[tokens..].iter().all(|&value| value == padding), "{key}");
    };
    check(&row.input_ids, "input_ids", 0);
    let position_ids: Vec<i64> = row.documents().flat_map(|d| 0..d.len() as i64).collect();
    check(&position_ids, "position_ids", 0);
    let document_ids = (0..).zip(row.documents()).flat_map(|(id, d)| d.map(move |_| id));
    check(&document_ids.collect::<Vec<i64>>(), "document_ids", -1);
    let mask: Vec<i64> = row.loss_mask.iter().map(|&supervised| i64::from(supervised)).collect();
    check(&mask, "loss_mask", 0);
}

/// The rules differ on purpose: theirs omits the last block of a row, ours positions whose next
/// token is not supervised. Where neither applies they must agree.
fn anchor_rules_agree_where_they_overlap(Case { value: case, .. }: &Case) {
    let loss_mask: Vec<bool> =
        integers(&case["loss_mask"]).into_iter().map(|value| value != 0).collect();
    let end = size(case, "T").saturating_sub(size(case, "block_size"));
    let theirs: Vec<usize> = positions(&case["candidate_positions"])
        .into_iter()
        .filter(|&position| loss_mask[position + 1])
        .collect();
    let sample = Sample { input_ids: vec![0; loss_mask.len()], loss_mask };
    let row = PackedRow::from_samples(&[(0, sample)], usize::MAX);
    let ours: Vec<usize> =
        anchor_candidates(&row).into_iter().filter(|&position| position < end).collect();
    assert_eq!(ours, theirs);
}

fn split(Case { value: case, .. }: &Case) {
    let ratio = case["ratio"].as_f64().unwrap();
    assert_eq!(split_index(size(case, "n"), ratio), size(case, "split"));
}
