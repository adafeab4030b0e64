//! The small rules in golden.json: masks, indices, weights, element losses, metrics, vocabulary.

use dflash_draft::BlockShape;
use dflash_draft::attention::{BlockPlan, Visibility, WindowRule};
use dflash_draft::objective::{
    BlockLabels, DraftVocabulary, HeadPass, LK_ETA, MASKED_SLOTS_EPSILON, NLA_EPSILON,
    TargetDistribution, decay_weights, dpace_weights, element_loss,
};
use dflash_golden::{Case, Check};
use dflash_tensor::LogitTransform;
use dflash_test_place::{assert_close, place};
use serde_json::Value;
use tch::{Kind, Tensor, no_grad};

use super::PATHS;
use super::speculators::{check_metrics, element, objective};
use super::vectors::{indices, matrix, numbers};

pub(crate) const CHECKS: [(&str, Check); 7] = [
    ("attention_masks", attention_mask),
    ("block_indices", block_indices),
    ("fixed_exp_decay", decay),
    ("dpace_weights", dpace),
    ("elementwise_losses", element_losses),
    ("compute_metrics", metrics),
    ("vocab_mapping", vocabulary),
];

fn int(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap() as usize
}

/// Every query row's mask bits, by the visibility rule and by the planned chunks. Blocks whose
/// anchor is padding are skipped by name: rows here have none.
fn attention_mask(Case { name, value: case, .. }: &Case) {
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
    let (on_padding, mut blocks): (Vec<usize>, Vec<usize>) =
        (0..anchors.len()).partition(|&block| documents[anchors[block]] < 0);
    for block in on_padding {
        println!("left out: block {block} of {name}, whose anchor {} is padding", anchors[block]);
    }
    // an unused block follows the others, with anchor 0
    blocks.sort_by_key(|&block| anchors[block]);
    let used: Vec<usize> = blocks.iter().map(|&block| anchors[block]).collect();
    let planned = planned_rows(&starts, &used, block_size, &visibility);
    let rows = case["rows"].as_array().unwrap();
    assert_eq!(rows.len(), anchors.len() * block_size);
    for (place, &block) in blocks.iter().enumerate() {
        let anchor = anchors[block];
        let start = *starts.iter().rfind(|&&start| start <= anchor).unwrap();
        for slot in 0..block_size {
            let bits = rows[block * block_size + slot].as_str().unwrap();
            let mut expected = vec!['0'; documents.len() + anchors.len() * block_size];
            let seen = visibility.context(anchor - start, slot);
            expected[start + seen.start..start + seen.end].fill('1');
            let own = visibility.own(slot, block_size);
            let first = documents.len() + block * block_size;
            expected[first + own.start..first + own.end].fill('1');
            let expected: String = expected.into_iter().collect();
            assert_eq!(expected, bits, "block {block}, slot {slot}");
            let planned = &planned[place * block_size + slot];
            assert_eq!(planned, &bits[..documents.len()], "planned block {block}, slot {slot}");
        }
    }
}

/// The context bits that the chunks let through for every row.
fn planned_rows(
    starts: &[usize],
    anchors: &[usize],
    block_size: usize,
    visibility: &Visibility,
) -> Vec<String> {
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
    rows.into_iter().map(|bits| bits.into_iter().collect()).collect()
}

fn block_indices(Case { value: case, .. }: &Case) {
    let anchors = indices(&case["anchors"]);
    let end = anchors.iter().max().unwrap() + 1;
    let plan = BlockPlan::new(&[0, end], &anchors, int(case, "block_size"), &[Visibility::FULL]);
    let positions: Vec<usize> = plan.slot_positions().iter().map(|&p| p as usize).collect();
    assert_eq!(positions, indices(&case["indices"]));
}

/// The block of a case that says whether the anchor's row predicts.
fn block(case: &Value, rows: usize) -> BlockShape {
    BlockShape { rows, first_predicting: usize::from(case["sample_from_anchor"] == false) }
}

fn decay(Case { value: case, .. }: &Case) {
    let weights =
        decay_weights(block(case, int(case, "block_size")), case["gamma"].as_f64().unwrap());
    for (weight, expected) in weights.iter().zip(numbers(&case["weights"])) {
        assert!((weight - expected).abs() < 1e-6, "{weights:?}");
    }
}

fn dpace(Case { value: case, .. }: &Case) {
    let shape = [-1, int(case, "block_size") as i64];
    let (ce, mask) = (matrix(&case["ce_times_mask"]), matrix(&case["loss_mask"]));
    let weights =
        dpace_weights(&ce.view(shape), &mask.view(shape), case["alpha"].as_f64().unwrap());
    assert_close("weights", &weights.view([-1]), &matrix(&case["weights"]), 1e-5);
}

fn element_losses(Case { key, value, section, .. }: &Case) {
    assert_eq!(section["nla_eps"], NLA_EPSILON);
    assert_eq!(section["lk_eta"], LK_ETA);
    let (logits, targets) = (matrix(&section["logits"]), matrix(&section["targets"]));
    let upstream = matrix(&section["grad_output"]).unsqueeze(1);
    let (loss, gradient) = no_grad(|| element_loss(element(key), &logits, &targets));
    assert_close(key, &loss, &matrix(&value["value"]), 1e-5);
    assert_close(key, &(gradient * &upstream), &matrix(&value["grad_logits"]), 1e-4);
}

/// The objective on given logits: an identity matrix as lm_head passes them through.
fn metrics(Case { value: case, section, .. }: &Case) {
    assert_eq!(section["denominator_eps"], MASKED_SLOTS_EPSILON);
    let (logits, targets) = (matrix(&section["logits"]), matrix(&section["targets"]));
    let identity = Tensor::eye(logits.size()[1], (Kind::Float, place().device));
    let mask: Vec<bool> = numbers(&case["loss_mask"]).iter().map(|&m| m != 0.0).collect();
    let rows: Vec<i64> = (0..mask.len() as i64).collect();
    let block = block(case, int(section, "block_size"));
    let labels = BlockLabels::from_slots(block, &mask, &rows, &rows);
    let rows_m = labels.distribution_rows_on(place().device);
    let output = LogitTransform::identity();
    let head_vh = identity.shallow_clone();
    let target_distribution = TargetDistribution { normed_rh: targets, rows_m, head_vh, output };
    for kernels in PATHS {
        no_grad(|| {
            let (_, gradient) = check_metrics(&objective(case, kernels), &case["metrics"], |o| {
                o.evaluate(HeadPass::plain(&identity), &logits, &labels, Some(&target_distribution))
            });
            assert_close("gradient", &gradient, &matrix(&case["grad_logits"]), 1e-4);
        });
    }
}

fn vocabulary(Case { value: case, .. }: &Case) {
    let selected: Vec<i64> = indices(&case["selected"]).iter().map(|&id| id as i64).collect();
    let vocabulary = DraftVocabulary::new(selected, int(case, "target_vocab_size"));
    let offsets: Vec<usize> = vocabulary.offsets().iter().map(|&d| d as usize).collect();
    assert_eq!(offsets, indices(&case["d2t_offsets"]));
    let membership: Vec<usize> = vocabulary.membership().iter().map(|&m| m.into()).collect();
    assert_eq!(membership, indices(&case["t2d"]));
}
