//! The small rules in golden.json: masks, indices, weights, element losses, metrics, vocabulary.

use std::path::Path;

use dflash_model::attention::{BlockPlan, Visibility, WindowRule};
use dflash_model::objective::{
    BlockLabels, Confidence, Denominator, DraftVocabulary, LabelSource, Objective, Teacher,
    Weighting, decay_weights, dpace_weights, element_loss,
};
use libtest_mimic::Trial;
use serde_json::Value;
use tch::{Kind, Tensor, no_grad};

use super::golden::{assert_close, indices, matrix, numbers, stem};
use super::speculators::{check_metrics, element};

type Check = fn(&Value);

pub(crate) fn trials(path: &Path) -> Vec<Trial> {
    let text = std::fs::read_to_string(path).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let checks: [(&str, Check); 7] = [
        ("attention_masks", |value| cases(value, attention_mask)),
        ("block_indices", |value| cases(value, block_indices)),
        ("fixed_exp_decay", |value| cases(value, decay)),
        ("dpace_weights", |value| cases(value, dpace)),
        ("elementwise_losses", element_losses),
        ("compute_metrics", metrics),
        ("vocab_mapping", |value| cases(value, vocabulary)),
    ];
    checks
        .into_iter()
        .filter(|(key, _)| golden.get(*key).is_some())
        .map(|(key, check)| {
            let value = golden[key].clone();
            Trial::test(format!("{}::{key}", stem(path)), move || {
                no_grad(|| check(&value));
                Ok(())
            })
        })
        .collect()
}

fn cases(value: &Value, check: Check) {
    let cases = value.as_array().unwrap();
    assert!(!cases.is_empty());
    cases.iter().for_each(check);
}

fn int(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap() as usize
}

/// Every query row's bits, by the visibility rule and by the planned chunks.
fn attention_mask(case: &Value) {
    let documents: Vec<i64> =
        case["document_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
    let (anchors, block_size) = (indices(&case["anchors"]), int(case, "block_size"));
    let causal = !case["sliding_window"].is_null() && case["sliding_window_non_causal"] == false;
    let visibility = Visibility {
        window: case["sliding_window"].as_u64().map(|w| (w as usize, WindowRule::Speculators)),
        causal_in_block: causal,
    };
    let mut starts = vec![0];
    starts.extend((1..documents.len()).filter(|&t| documents[t] != documents[t - 1]));
    starts.push(documents.len());
    let planned = planned_rows(&starts, &anchors, block_size, &visibility);
    for (row, bits) in case["rows"].as_array().unwrap().iter().enumerate() {
        let (block, slot) = (row / block_size, row % block_size);
        let start = *starts.iter().rfind(|&&start| start <= anchors[block]).unwrap();
        let seen = visibility.context(anchors[block] - start, slot);
        let mut expected = vec!['0'; documents.len() + anchors.len() * block_size];
        expected[start + seen.start..start + seen.end].fill('1');
        let own = documents.len() + block * block_size;
        let last = if causal { slot + 1 } else { block_size };
        expected[own..own + last].fill('1');
        let expected: String = expected.into_iter().collect();
        assert_eq!(expected, bits.as_str().unwrap(), "{} row {row}", case["name"]);
        if let Some(planned) = &planned {
            assert_eq!(
                planned[row],
                bits.as_str().unwrap()[..documents.len()],
                "planned row {row}"
            );
        }
    }
}

/// Context bits of every row as the chunks let them through; `None` for unsorted anchors, which
/// stand for unused blocks there and are never planned here.
fn planned_rows(
    starts: &[usize],
    anchors: &[usize],
    block_size: usize,
    visibility: &Visibility,
) -> Option<Vec<String>> {
    if !anchors.is_sorted() {
        return None;
    }
    let plan = BlockPlan::new(starts, anchors, block_size, &[*visibility]);
    let sources: Vec<usize> = plan.context_sources().flatten().collect();
    let length = *starts.last().unwrap();
    let mut rows = vec![vec!['0'; length]; anchors.len() * block_size];
    for chunk in plan.chunks(visibility, 1) {
        for segment in &chunk.segments {
            for row in 0..chunk.anchors.len() * block_size {
                let all = 0..segment.context.len();
                let limit = segment.row_limits.as_ref().map_or(all, |limits| limits[row].clone());
                for column in limit {
                    let bits = &mut rows[chunk.anchors.start * block_size + row];
                    bits[sources[segment.context.start + column]] = '1';
                }
            }
        }
    }
    Some(rows.into_iter().map(|bits| bits.into_iter().collect()).collect())
}

fn block_indices(case: &Value) {
    let anchors = indices(&case["anchors"]);
    let end = anchors.last().unwrap() + 1;
    let plan = BlockPlan::new(&[0, end], &anchors, int(case, "block_size"), &[Visibility::FULL]);
    let positions: Vec<usize> = plan.slot_positions().iter().map(|&p| p as usize).collect();
    assert_eq!(positions, indices(&case["indices"]));
}

fn decay(case: &Value) {
    let first = usize::from(case["sample_from_anchor"] == false);
    let weights = decay_weights(int(case, "block_size"), first, case["gamma"].as_f64().unwrap());
    for (weight, expected) in weights.iter().zip(numbers(&case["weights"])) {
        assert!((weight - expected).abs() < 1e-6, "{weights:?}");
    }
}

fn dpace(case: &Value) {
    let shape = [-1, int(case, "block_size") as i64];
    let (ce, mask) = (matrix(&case["ce_times_mask"]), matrix(&case["loss_mask"]));
    let weights =
        dpace_weights(&ce.view(shape), &mask.view(shape), case["alpha"].as_f64().unwrap());
    assert_close("weights", &weights.view([-1]), &matrix(&case["weights"]), 1e-5);
}

fn element_losses(value: &Value) {
    let (logits, targets) = (matrix(&value["logits"]), matrix(&value["targets"]));
    let upstream = matrix(&value["grad_output"]).unsqueeze(1);
    let losses = value["losses"].as_object().unwrap();
    assert!(!losses.is_empty());
    for (name, expected) in losses {
        let (loss, gradient) = element_loss(element(name), &logits, &targets);
        assert_close(name, &loss, &matrix(&expected["value"]), 1e-5);
        assert_close(name, &(gradient * &upstream), &matrix(&expected["grad_logits"]), 1e-4);
    }
}

/// The objective on given logits: an identity for the lm_head passes them through.
fn metrics(value: &Value) {
    let (logits, targets) = (matrix(&value["logits"]), matrix(&value["targets"]));
    let identity = Tensor::eye(logits.size()[1], (Kind::Float, tch::Device::Cpu));
    let block_size = int(value, "block_size");
    for case in value["cases"].as_array().unwrap() {
        let mask: Vec<bool> = numbers(&case["loss_mask"]).iter().map(|&m| m != 0.0).collect();
        let rows: Vec<i64> = (0..mask.len() as i64).collect();
        let first = usize::from(case["sample_from_anchor"] == false);
        let labels = BlockLabels::from_slots((block_size, first), &mask, &rows, &rows);
        let rows_m = labels.teacher_rows_on(tch::Device::Cpu);
        let normed_rh = targets.shallow_clone();
        let teacher = Teacher { normed_rh, rows_m, head_vh: identity.shallow_clone() };
        let objective = objective(case);
        let output = objective.evaluate(&logits, &identity, &labels, Some(&teacher));
        let epsilon = objective.denominator.epsilon();
        let report = output.statistics.report(epsilon);
        check_metrics(&report, &case["metrics"]);
        let gradient = output.dhidden_nh / (report.denominator + epsilon);
        assert_close("gradient", &gradient, &matrix(&case["grad_logits"]), 1e-4);
    }
}

fn objective(case: &Value) -> Objective {
    let number = |key: &str| case[key].as_f64().unwrap();
    let weighting = match case["per_position_loss_weight"].as_str().unwrap() {
        "dpace" => Weighting::Dpace { alpha: number("dpace_alpha"), confidence: Confidence::Term },
        _ => Weighting::Decay { gamma: number("gamma") },
    };
    Objective {
        terms: vec![(element(case["loss_fn"].as_str().unwrap()), 1.0)],
        weighting,
        denominator: Denominator::MaskedSlots,
        labels: LabelSource::TeacherArgmax,
        chunk_bytes: 1 << 20,
    }
}

fn vocabulary(case: &Value) {
    let selected: Vec<i64> = indices(&case["selected"]).iter().map(|&id| id as i64).collect();
    let vocabulary = DraftVocabulary::new(selected, int(case, "target_vocab_size"));
    let offsets: Vec<usize> = vocabulary.offsets().iter().map(|&d| d as usize).collect();
    assert_eq!(offsets, indices(&case["d2t_offsets"]));
    let membership: Vec<usize> = vocabulary.membership().iter().map(|&m| m.into()).collect();
    assert_eq!(membership, indices(&case["t2d"]));
}
