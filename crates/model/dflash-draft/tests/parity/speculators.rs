//! speculators' training pass: hidden states, logits, loss, metrics and every gradient.

use std::path::Path;

use dflash_draft::attention::WindowRule;
use dflash_draft::objective::{
    BlockLabels, Confidence, Denominator, ElementLoss, HeadPass, LabelSource, LossOutput,
    Objective, StatisticsReport, TargetDistribution, Weighting,
};
use dflash_draft::{
    BlockShape, Draft, DraftConfig, DraftViews, HeadFields, Keep, LayerKind, PackedInput,
    plan_blocks,
};
use dflash_tensor::ops::rms_norm;
use dflash_tensor::{Kernels, LogitTransform};
use dflash_test_place::{assert_close, place};
use serde_json::Value;
use tch::{Kind, Tensor, no_grad};

use super::vectors::Vectors;
use super::zlab;

const TOLERANCE: f64 = 1e-4;

pub(crate) fn check(path: &Path, kernels: Kernels) {
    no_grad(|| {
        let case = Case::open(path, kernels);
        let (hidden, saved) = case.draft.forward_keeping(&case.input, Keep::Activations);
        case.check_outputs(&hidden);
        let head = case.vectors.tensor("w.lm_head.weight");
        let evaluate = |objective: &Objective| {
            objective.evaluate(
                HeadPass::plain(&head),
                &hidden,
                &case.labels,
                Some(&case.target_distribution),
            )
        };
        let metrics = case.vectors.json("metrics");
        let (report, dhidden) = check_metrics(&case.objective, &metrics, evaluate);
        assert_close("loss", &Tensor::from(report.loss), &case.vectors.row("out.loss"), TOLERANCE);
        case.check_gradients(dhidden, saved);
    });
}

struct Case {
    vectors: Vectors,
    draft: Draft,
    input: PackedInput,
    objective: Objective,
    labels: BlockLabels,
    target_distribution: TargetDistribution,
    /// Slots of the blocks with a valid anchor.
    slots: Tensor,
}

impl Case {
    fn open(path: &Path, kernels: Kernels) -> Self {
        let vectors = Vectors::open(path);
        let stored = vectors.json("config");
        let config = draft_config(&stored);
        let draft = zlab::load(&vectors, config).with_kernels(kernels);
        let rows = draft.config().block_size;
        let valid = vectors.integers("in.anchor_valid");
        let all_anchors = vectors.integers("in.anchors");
        let used: Vec<usize> = (0..valid.len()).filter(|&index| valid[index] != 0).collect();
        let anchors: Vec<usize> = used.iter().map(|&index| all_anchors[index] as usize).collect();
        let slots: Vec<i64> = used
            .iter()
            .flat_map(|index| index * rows..(index + 1) * rows)
            .map(|slot| slot as i64)
            .collect();
        let slots = on_device(&slots);
        let input = packed_input(&vectors, &stored, &draft, &anchors);
        let first_predicting = usize::from(!stored["sample_from_anchor"].as_bool().unwrap());
        let block = BlockShape { rows, first_predicting };
        let target_distribution = target_distribution(&vectors, &stored, &slots);
        let labels = labels(&vectors, block, &slots);
        let target_distribution = TargetDistribution {
            rows_m: labels.distribution_rows_on(draft.device()),
            ..target_distribution
        };
        let settings: Value = ["loss_fn", "per_position_loss_weight", "gamma", "dpace_alpha"]
            .map(|key| (key.to_owned(), Value::from(vectors.note(key))))
            .into_iter()
            .collect();
        let objective = objective(&settings, kernels);
        Self { vectors, draft, input, objective, labels, target_distribution, slots }
    }

    fn check_outputs(&self, hidden: &Tensor) {
        let expected = |name: &str| self.vectors.row(name).index_select(0, &self.slots);
        assert_close("hidden", hidden, &expected("out.hidden"), TOLERANCE);
        let logits = hidden.matmul(&self.vectors.tensor("w.lm_head.weight").tr());
        assert_close("logits", &logits, &expected("out.logits"), TOLERANCE);
    }

    fn check_gradients(&self, dhidden: Tensor, saved: dflash_draft::Saved) {
        let (flat, views): (Tensor, DraftViews) = self.draft.zero_gradients();
        let mut finished = Vec::new();
        let mut finish = |bucket: usize| finished.push(bucket);
        self.draft.backward(dhidden, &self.input, saved, &views, &mut finish);
        let buckets = self.draft.layout().buckets().len();
        assert_eq!(finished, (0..buckets).rev().collect::<Vec<_>>());
        let mut compared = 0;
        for parameter in self.draft.layout().parameters() {
            let expected = self.vectors.tensor(&format!("grad.{}", parameter.name));
            assert_close(&parameter.name, &parameter.view(&flat), &expected, TOLERANCE);
            compared += 1;
        }
        let stored = self.vectors.names().iter().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(compared, stored, "every stored gradient is compared");
    }
}

fn draft_config(stored: &Value) -> DraftConfig {
    let int = |key: &str| stored[key].as_i64().unwrap();
    let layers = stored["layer_types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| match kind.as_str().unwrap() {
            "sliding_attention" => LayerKind::Sliding,
            _ => LayerKind::Full,
        })
        .collect();
    DraftConfig {
        hidden_size: int("hidden_size"),
        intermediate_size: int("intermediate_size"),
        num_attention_heads: int("num_attention_heads"),
        num_key_value_heads: int("num_key_value_heads"),
        head_dim: int("head_dim"),
        attention_bias: stored["attention_bias"].as_bool().unwrap_or(false),
        rms_norm_eps: stored["rms_norm_eps"].as_f64().unwrap(),
        rope_theta: stored["rope_theta"].as_f64().unwrap(),
        rope_scaling: None,
        layers,
        sliding_window: stored["sliding_window"].as_u64().map(|window| window as usize),
        block_size: int("block_size") as usize,
        mask_token_id: int("mask_token_id"),
        target_layer_ids: (1..=int("num_aux") as u32).collect(),
        num_target_layers: None,
        vocab_size: int("vocab_size"),
        max_position_embeddings: 4096,
        initializer_range: 0.02,
        eos_token_id: None,
        head: HeadFields::default(),
    }
}

/// First position of each document (padding counts as one more), and the row's end.
fn document_starts(document_ids: &[i64]) -> Vec<usize> {
    let mut starts = vec![0];
    starts.extend((1..document_ids.len()).filter(|&t| document_ids[t] != document_ids[t - 1]));
    starts.push(document_ids.len());
    starts
}

fn packed_input(
    vectors: &Vectors,
    stored: &Value,
    draft: &Draft,
    anchors: &[usize],
) -> PackedInput {
    let config = draft.config();
    let starts = document_starts(&vectors.integers("in.document_ids"));
    let plan = plan_blocks(config, &starts, anchors, WindowRule::Speculators);
    let rows: Vec<i64> = plan.context_sources().flatten().map(|row| row as i64).collect();
    let features = vectors.row("in.hidden_states").index_select(0, &on_device(&rows));
    let input_ids = vectors.integers("in.input_ids");
    let ids: Vec<i64> = anchors
        .iter()
        .flat_map(|&anchor| {
            (0..config.block_size).map(move |slot| if slot == 0 { Some(anchor) } else { None })
        })
        .map(|anchor| anchor.map_or(config.mask_token_id, |anchor| input_ids[anchor]))
        .collect();
    let slots = vectors.tensor("w.embed_tokens.weight").index_select(0, &on_device(&ids));
    let slides = config.layers.contains(&LayerKind::Sliding);
    assert!(!slides || stored["sliding_window_non_causal"] == false);
    draft.prepare(&plan, WindowRule::Speculators, features, slots)
}

/// The target's distribution rows, checked against the stored targets. In the file's type: in
/// bfloat16 another token may be the argmax, which would be another label.
fn target_distribution(vectors: &Vectors, stored: &Value, slots: &Tensor) -> TargetDistribution {
    let eps = stored["rms_norm_eps"].as_f64().unwrap();
    let last = vectors.stored("in.verifier_last_hidden_states").squeeze_dim(0);
    let normed_rh = rms_norm(&last, &vectors.stored("w.verifier_norm.weight"), eps);
    let head = vectors.stored("w.verifier_lm_head.weight");
    let rows_m = on_device(&distribution_rows(vectors, stored)).index_select(0, slots);
    let targets = normed_rh.index_select(0, &rows_m).matmul(&head.tr());
    let expected = vectors.row("out.targets").index_select(0, slots);
    assert_close("targets", &targets, &expected, TOLERANCE);
    let output = LogitTransform::identity();
    TargetDistribution { normed_rh, rows_m, head_vh: head, output }
}

fn distribution_rows(vectors: &Vectors, stored: &Value) -> Vec<i64> {
    let length = vectors.row("in.input_ids").size()[0];
    let shift = i64::from(!stored["sample_from_anchor"].as_bool().unwrap());
    vectors
        .integers("out.anchored_block_indices")
        .iter()
        .map(|index| (index - shift).rem_euclid(length))
        .collect()
}

fn on_device(indices: &[i64]) -> Tensor {
    Tensor::from_slice(indices).to_device(place().device)
}

fn labels(vectors: &Vectors, block: BlockShape, slots: &Tensor) -> BlockLabels {
    let stored = vectors.json("config");
    let take = |x: &Tensor| Vec::<i64>::try_from(x.index_select(0, slots)).unwrap();
    let mask_tensor = vectors.row("out.aligned_loss_mask").to_kind(Kind::Int64);
    let mask: Vec<bool> = take(&mask_tensor).iter().map(|&m| m != 0).collect();
    let rows = take(&on_device(&distribution_rows(vectors, &stored)));
    BlockLabels::from_slots(block, &mask, &vec![0; mask.len()], &rows)
}

/// The objective that a case names: `loss_fn` is one loss or several with coefficients, as an
/// object or as its text form.
pub(crate) fn objective(case: &Value, kernels: Kernels) -> Objective {
    let number = |key: &str| {
        let value = &case[key];
        value.as_f64().or_else(|| value.as_str()?.parse().ok()).unwrap_or_else(|| panic!("{key}"))
    };
    let weighting = match case["per_position_loss_weight"].as_str() {
        Some("dpace") => {
            Weighting::Dpace { alpha: number("dpace_alpha"), confidence: Confidence::Term }
        }
        Some("fixed-exp-decay") => Weighting::Decay { gamma: number("gamma") },
        // every slot has the same weight
        None | Some("none") => Weighting::Decay { gamma: f64::INFINITY },
        Some(other) => panic!("weight {other} is not implemented"),
    };
    Objective {
        terms: terms(&case["loss_fn"]),
        weighting,
        denominator: Denominator::MaskedSlots,
        labels: LabelSource::TargetArgmax,
        // a block or two at a time
        chunk_bytes: 1 << 12,
        kernels,
    }
}

fn terms(stored: &Value) -> Vec<(ElementLoss, f64)> {
    let parsed = stored.as_str().and_then(|text| serde_json::from_str(text).ok());
    match parsed.as_ref().unwrap_or(stored) {
        Value::Object(map) => map.iter().map(|(name, c)| (element(name), number(c))).collect(),
        name => vec![(element(name.as_str().unwrap()), 1.0)],
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a coefficient")
}

/// speculators' names of the element losses.
const ELEMENTS: [(&str, ElementLoss); 11] = [
    ("ce", ElementLoss::CrossEntropy),
    ("kl_div", ElementLoss::Kl),
    ("kl", ElementLoss::Kl),
    ("rkl", ElementLoss::ReverseKl),
    ("reverse_kl", ElementLoss::ReverseKl),
    ("jsd", ElementLoss::Jsd),
    ("js_div", ElementLoss::Jsd),
    ("tv", ElementLoss::Tv),
    ("nla", ElementLoss::Nla),
    ("lk_hybrid", ElementLoss::Lk),
    ("lk", ElementLoss::Lk),
];

pub(crate) fn element(name: &str) -> ElementLoss {
    let found = ELEMENTS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("loss {name} is not implemented")).1
}

/// Compares an objective's sums with speculators' sums and totals, also per term if there are
/// several; returns the report and the gradient of the mean loss.
pub(crate) fn check_metrics(
    objective: &Objective,
    metrics: &Value,
    evaluate: impl Fn(&Objective) -> LossOutput,
) -> (StatisticsReport, Tensor) {
    let ratio = |name: &str| {
        let part = |suffix: &str| metrics[format!("{name}_{suffix}")].as_f64();
        Some(part("sum")? / part("total").filter(|&total| total > 0.0)?)
    };
    let near = |what: &str, actual: f64, expected: f64| {
        let close = (actual - expected).abs() <= place().bound(1e-4) * expected.abs().max(1.0);
        assert!(close, "{what}: {actual}, expected {expected}");
    };
    let epsilon = objective.denominator.epsilon();
    let output = evaluate(objective);
    let report = output.statistics.report(epsilon);
    if place().is_fake_cuda {
        return (report, output.dhidden_nh);
    }
    near("loss", report.loss, ratio("loss").unwrap());
    for (name, element) in ELEMENTS {
        if let Some(expected) = ratio(&format!("{name}_loss")) {
            let alone = Objective { terms: vec![(element, 1.0)], ..objective.clone() };
            near(name, evaluate(&alone).statistics.report(epsilon).loss, expected);
        }
    }
    if let Some(accuracy) = ratio("full_acc") {
        near("accuracy", report.accuracy, accuracy);
    }
    for (slot, accuracy) in report.accuracy_by_slot.iter().enumerate() {
        if let Some(expected) = ratio(&format!("position_{slot}_acc")) {
            near("slot accuracy", accuracy.unwrap(), expected);
        }
    }
    // Vectors before speculators 0.9, which lack `accept_len`, hold the older metric: the summed
    // product of unconditional accuracies. Ours conditions on earlier slots, like the newer one.
    let product =
        report.accuracy_by_slot.iter().skip_while(|slot| slot.is_none()).scan(1.0, |run, slot| {
            *run *= slot.unwrap_or(0.0);
            Some(*run)
        });
    let conditional = ratio("accept_len").is_some();
    let length = if conditional { report.expected_acceptance_length } else { product.sum() };
    near("expected length", length, ratio("eal").unwrap());
    let gradient = output.dhidden_nh / (report.denominator + epsilon);
    (report, gradient)
}
