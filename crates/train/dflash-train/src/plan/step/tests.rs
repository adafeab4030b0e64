//! The whole step at typical training shapes, and its budget.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dflash_data::AnchorOptions;
use dflash_draft::flops::RowWork;
use dflash_draft::objective::{Confidence, Denominator, ElementLoss, LabelSource, Weighting};
use dflash_draft::{HeadFields, LayerKind};
use dflash_tensor::Kernels;

use super::*;
use crate::gpus::Gpu;
use crate::optimizer::{Algorithm, MuonConfig};
use crate::plan::Budget;
use crate::plan::efficiency::{Efficiency, RatedGpu};

const TOKENS: usize = 8192;
const BLOCK: usize = 16;

/// A target's dimensions, from its config.json.
#[derive(Clone, Copy)]
struct Dimensions {
    name: &'static str,
    hidden: i64,
    intermediate: i64,
    heads: (i64, i64),
    head_dim: i64,
    layers: usize,
    vocabulary: i64,
}

const QWEN3_8B: Dimensions = Dimensions {
    name: "Qwen3-8B",
    hidden: 4096,
    intermediate: 12288,
    heads: (32, 8),
    head_dim: 128,
    layers: 36,
    vocabulary: 151_936,
};

const QWEN3_32B: Dimensions = Dimensions {
    name: "Qwen3-32B",
    hidden: 5120,
    intermediate: 25600,
    heads: (64, 8),
    head_dim: 128,
    layers: 64,
    vocabulary: 151_936,
};

/// Its lm_head and hidden size; the layers are Qwen3's, with an MLP of three times that size.
const GPT_OSS_120B: Dimensions = Dimensions {
    name: "gpt-oss-120b",
    hidden: 2880,
    intermediate: 8640,
    heads: (64, 8),
    head_dim: 64,
    layers: 36,
    vocabulary: 201_088,
};

const SHAPES: [Dimensions; 3] = [QWEN3_8B, QWEN3_32B, GPT_OSS_120B];

fn draft(of: &Dimensions) -> DraftConfig {
    DraftConfig {
        hidden_size: of.hidden,
        intermediate_size: of.intermediate,
        num_attention_heads: of.heads.0,
        num_key_value_heads: of.heads.1,
        head_dim: of.head_dim,
        attention_bias: false,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        rope_scaling: None,
        layers: vec![LayerKind::Full; 5],
        sliding_window: None,
        block_size: BLOCK,
        mask_token_id: of.vocabulary - 1,
        target_layer_ids: vec![2, 10, 18, 26, 34],
        num_target_layers: Some(of.layers),
        vocab_size: of.vocabulary,
        max_position_embeddings: 40960,
        initializer_range: 0.02,
        eos_token_id: None,
        head: HeadFields::default(),
    }
}

/// One document as long as the row.
fn row() -> PackedRow {
    PackedRow {
        input_ids: vec![0; TOKENS],
        loss_mask: vec![true; TOKENS],
        document_starts: vec![0, TOKENS],
        samples: vec![0],
    }
}

fn objective() -> Objective {
    Objective {
        terms: vec![(ElementLoss::CrossEntropy, 1.0)],
        weighting: Weighting::Decay { gamma: 7.0 },
        denominator: Denominator::Weights,
        labels: LabelSource::Data,
        chunk_bytes: dflash_settings::loss_chunk_bytes(None, Some(u64::MAX)),
        kernels: Kernels::Fast,
    }
}

fn shape<'a>(draft: &'a DraftConfig, row: &'a PackedRow, anchors: usize) -> StepShape<'a> {
    StepShape {
        draft,
        kind: Kind::BFloat16,
        tied: false,
        blocks: BlockMaker {
            anchors: AnchorOptions { per_document: anchors, per_row: anchors, seed: 1, epoch: 0 },
            vocabulary: None,
            head_rows: draft.vocab_size as usize,
            target_distribution: false,
        },
        objective: objective(),
        optimizer: OptimizerConfig::default(),
        keep: Keep::Activations,
        row,
        micro_batches: 1,
    }
}

fn budget(of: &Dimensions, anchors: usize, gpu: &str) -> Budget {
    let (draft, row) = (draft(of), row());
    let shape = shape(&draft, &row, anchors);
    let useful = shape.work().flops(&draft).total();
    let gpu = Gpu::named(gpu).unwrap();
    let efficiency = Efficiency::assumed(&gpu);
    Budget::new(&shape.record().unwrap(), useful, RatedGpu { gpu: &gpu, efficiency: &efficiency })
}

impl StepShape<'_> {
    fn work(&self) -> RowWork {
        self.blocks.draw(self.draft, self.row, 0).work
    }
}

/// The message of the panic that ends `f` on a fake CUDA device.
fn refusal(f: impl FnOnce()) -> String {
    let run = || trace::on_fake_cuda(|| tch::no_grad(f));
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("nothing was refused");
    panic.downcast_ref::<String>().cloned().expect("a panic with a message")
}

/// Maximum launches of a step of 512 anchors, for any shape: outside matmuls, and in flash
/// attention, where each layer makes nine calls with one launch forward and five backward.
const MOST_LAUNCHES: (u64, u64) = (400, 5 * 9 * 6);
/// Minimum utilization for Qwen3-8B on an H200, with 512 and with 3,072 anchors.
const LEAST_MFU: [(usize, f64); 2] = [(512, 0.42), (3072, 0.50)];

#[test]
fn a_step_launches_few_kernels_and_never_waits() {
    for of in &SHAPES {
        let budget = budget(of, 512, "H200");
        eprintln!("{}\n{budget}", of.name);
        let (launches, waits) = (budget.launches_beyond_products, budget.waits);
        let in_attention = budget.attention_launches;
        assert!(launches < MOST_LAUNCHES.0 && waits == 0, "{}\n{budget}", of.name);
        assert!(in_attention <= MOST_LAUNCHES.1, "{}\n{budget}", of.name);
        assert!(budget.launches > launches + in_attention);
        let sum: u64 = budget.parts.iter().map(|part| part.launches).sum();
        assert_eq!(sum, budget.launches);
        assert!((budget.parts.iter().map(|part| part.share).sum::<f64>() - 1.0).abs() < 1e-9);
        for part in ["rows", "features", "projections", "attention", "mlp", "loss", "optimizer"] {
            assert!(budget.parts.iter().any(|found| found.part == part), "{part}\n{budget}");
        }
    }
}

/// The sustained figures are reported in addition: lower, for matmuls only.
#[test]
fn a_slow_day_is_told_too() {
    let budget = budget(&QWEN3_8B, 512, "H200");
    let slow = budget.slow.expect("nothing is measured");
    assert_eq!((budget.products_share, slow.products_share), (0.75, 0.65));
    let longer = slow.step_ms / budget.step_ms;
    assert!((1.05..0.75 / 0.65).contains(&longer), "{longer}");
    assert!((slow.mfu * longer / budget.mfu - 1.0).abs() < 1e-9);
}

#[test]
fn a_step_is_predicted_to_be_fast() {
    for (anchors, least) in LEAST_MFU {
        let budget = budget(&QWEN3_8B, anchors, "H200");
        assert!(budget.mfu >= least, "{anchors} anchors\n{budget}");
    }
}

#[test]
fn what_is_noted_is_the_arithmetic_that_the_row_needs() {
    for of in &SHAPES {
        let (draft, row) = (draft(of), row());
        let shape = shape(&draft, &row, 512);
        let (work, record) = (shape.work(), shape.record().unwrap());
        let sum = |attention: bool| -> f64 {
            let all = record.events.iter();
            all.filter(|event| event.operation.contains("flash") == attention)
                .map(|event| event.flops)
                .sum()
        };
        let q_width = (of.heads.0 * of.head_dim) as f64;
        let kv_width = 2.0 * (of.heads.1 * of.head_dim) as f64;
        let attention = 4.0 * q_width * work.full_pairs * draft.layers.len() as f64;
        // the kernels recompute the scores in their backward pass
        assert_eq!(sum(true), 3.5 * attention, "{}", of.name);
        // the gradient of the first layer's input is computed, although nothing needs it
        let unneeded = 2.0 * work.slots * of.hidden as f64 * (q_width + kv_width);
        let expected = work.flops(&draft).total() - 3.0 * attention + unneeded;
        assert!(
            (sum(false) / expected - 1.0).abs() < 1e-12,
            "{}: {} {expected}",
            of.name,
            sum(false)
        );
    }
}

#[test]
fn the_peak_holds_weights_state_and_activations() {
    let (draft, row) = (draft(&QWEN3_8B), row());
    let elements = dflash_draft::DraftLayout::new(&draft).elements() as f64;
    let record = shape(&draft, &row, 512).record().unwrap();
    let head = 2.0 * (2 * QWEN3_8B.vocabulary * QWEN3_8B.hidden) as f64;
    // master weights, gradients and two moments in float32, and the bfloat16 copy
    let state = elements * 18.0 + head;
    let peak = record.peak_bytes as f64;
    assert!(peak > state && peak < 2.0 * state, "{peak} {state}");
    let mut keeping_less = shape(&draft, &row, 3072);
    let all = keeping_less.record().unwrap().peak_bytes;
    keeping_less.keep = Keep::Inputs;
    assert!(keeping_less.record().unwrap().peak_bytes < all);
}

#[test]
fn every_way_to_train_reads_nothing_before_its_end() {
    let (plain, row) = (draft(&QWEN3_8B), row());
    let run = |name: &str, change: &dyn Fn(&mut StepShape<'_>), draft: &DraftConfig| {
        let mut shape = shape(draft, &row, 256);
        change(&mut shape);
        let record = shape.record().unwrap();
        assert!(record.events.len() > 200, "{name}");
        record
    };
    let once = run("plain", &|_| (), &plain);
    let twice = run("two micro-batches", &|shape| shape.micro_batches = 2, &plain);
    assert!(twice.events.len() > once.events.len() * 3 / 2);
    run("recompute", &|shape| shape.keep = Keep::Inputs, &plain);
    let muon = Algorithm::Muon(MuonConfig::default());
    run("muon", &|shape| shape.optimizer.algorithm = muon, &plain);
    run("average", &|shape| shape.optimizer.ema_decay = Some(0.999), &plain);
    run("pruned", &|shape| shape.blocks.head_rows = 32_000, &plain);
    let dpace = Weighting::Dpace { alpha: 0.5, confidence: Confidence::CrossEntropy };
    run("dpace", &|shape| shape.objective.weighting = dpace, &plain);
    let target_distribution = |shape: &mut StepShape<'_>| {
        shape.objective.terms = vec![(ElementLoss::Kl, 0.5), (ElementLoss::Tv, 0.5)];
        shape.blocks.target_distribution = true;
    };
    run("target distribution", &target_distribution, &plain);
    let sliding = DraftConfig {
        layers: vec![LayerKind::Sliding; 5],
        sliding_window: Some(1024),
        ..plain.clone()
    };
    let windowed = run("sliding", &|_| (), &sliding);
    let flops = |record: &Record| record.events.iter().map(|event| event.flops).sum::<f64>();
    assert!(flops(&windowed) < flops(&once));
}

#[test]
fn a_value_that_is_read_within_a_step_is_found() {
    let (draft, row) = (draft(&QWEN3_8B), row());
    let message = refusal(|| {
        let shape = shape(&draft, &row, 8);
        let mut trainer = shape.trainer();
        let mut open = trainer.begin(&Single);
        let batch = shape.batch(open.trainer());
        open.add(Some(batch), true).unwrap().unwrap();
        let _ = open.trainer().gradient.get(0).double_value(&[]);
    });
    assert!(message.contains("aten::_local_scalar_dense reads a value of the GPU"), "{message}");
}

#[test]
fn a_tensor_that_was_left_on_the_host_is_found() {
    let (draft, row) = (draft(&QWEN3_8B), row());
    let message = refusal(|| {
        let shape = shape(&draft, &row, 8);
        let trainer = shape.trainer();
        let blocks = shape.blocks.draw(&draft, &row, 0);
        let size = [blocks.plan.context_rows() as i64, draft.aux_layers() * draft.hidden_size];
        let on_host = Tensor::empty(size, (Kind::BFloat16, Device::Cpu));
        let ids = upload(&slot_ids(&draft, &row, blocks.plan.anchors()), GPU);
        let batch = trainer.batches.batch(&trainer.draft, blocks, on_host, &ids);
        let _ = trainer.draft.forward_keeping(&batch.input, Keep::Activations);
    });
    assert!(message.contains("aten::mm: mixes a tensor on cpu"), "{message}");
}
