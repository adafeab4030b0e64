//! A packed row of realistic shape: float32 on all paths (kernels, flash attention, chunks,
//! threads; libtorch's operations; the GPU kernels, emulated) gives the loss and every gradient of
//! float64.

use dflash_draft::attention::WindowRule;
use dflash_draft::objective::{
    BlockLabels, Denominator, ElementLoss, HeadPass, LabelSource, LabelledRow, Objective, Weighting,
};
use dflash_draft::{Draft, DraftConfig, Fresh, HeadFields, Keep, LayerKind, plan_blocks};
use dflash_tensor::Kernels;
use dflash_test_support::alone;
use tch::{Device, Kind, Tensor, no_grad};

const TOKENS: usize = 700;
const VOCABULARY: i64 = 500;

fn config() -> DraftConfig {
    DraftConfig {
        hidden_size: 128,
        intermediate_size: 384,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 32,
        attention_bias: true,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        layers: vec![LayerKind::Full, LayerKind::Sliding, LayerKind::Full],
        sliding_window: Some(50),
        block_size: 8,
        mask_token_id: VOCABULARY - 1,
        target_layer_ids: vec![1, 2],
        num_target_layers: Some(3),
        vocab_size: VOCABULARY,
        max_position_embeddings: 4096,
        initializer_range: 0.05,
        eos_token_id: None,
        head: HeadFields::default(),
    }
}

/// Weights of a draft, with random biases.
fn fresh(config: DraftConfig) -> Tensor {
    let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    let draft = Draft::init(config, Device::Cpu, normal);
    for bias in
        draft.layout().parameters().iter().filter(|parameter| parameter.fresh == Fresh::Zeros)
    {
        bias.view(draft.flat()).copy_(&(normal(&bias.shape) * 0.3));
    }
    draft.flat().shallow_clone()
}

struct Row {
    starts: Vec<usize>,
    ids: Vec<i64>,
    mask: Vec<bool>,
    anchors: Vec<usize>,
    features_tk: Tensor,
    embedding_vh: Tensor,
    head_vh: Tensor,
}

impl Row {
    fn new(config: &DraftConfig) -> Self {
        let wide = (Kind::Double, Device::Cpu);
        let mask: Vec<bool> = (0..TOKENS).map(|t| t % 97 > 20).collect();
        Self {
            starts: vec![0, 210, 215, 480, TOKENS],
            ids: (0..TOKENS).map(|t| (t * t % 401) as i64).collect(),
            anchors: (0..TOKENS - 1).filter(|&t| mask[t] && mask[t + 1] && t % 2 == 0).collect(),
            mask,
            features_tk: Tensor::randn(
                [TOKENS as i64, config.aux_layers() * config.hidden_size],
                wide,
            ),
            embedding_vh: Tensor::randn([VOCABULARY, config.hidden_size], wide) * 0.1,
            head_vh: Tensor::randn([VOCABULARY, config.hidden_size], wide) * 0.1,
        }
    }

    /// Loss and flat gradient of its numerator.
    fn gradient(&self, draft: &Draft, (weighting, kernels): (Weighting, Kernels)) -> (f64, Tensor) {
        let (config, kind) = (draft.config(), draft.flat().kind());
        let plan = plan_blocks(config, &self.starts, &self.anchors, WindowRule::Serving);
        let rows: Vec<i64> = plan.context_sources().flatten().map(|row| row as i64).collect();
        let features = self.features_tk.index_select(0, &Tensor::from_slice(&rows)).to_kind(kind);
        let mut ids = vec![config.mask_token_id; plan.slots()];
        for (block, &anchor) in self.anchors.iter().enumerate() {
            ids[block * config.block_size] = self.ids[anchor];
        }
        let slots = self.embedding_vh.index_select(0, &Tensor::from_slice(&ids)).to_kind(kind);
        let labelled = LabelledRow {
            input_ids: &self.ids,
            loss_mask: &self.mask,
            document_starts: &self.starts,
        };
        let labels = BlockLabels::new(labelled, &self.anchors, config.block(), None);
        let objective = Objective {
            terms: vec![(ElementLoss::CrossEntropy, 1.0)],
            weighting,
            denominator: Denominator::Weights,
            labels: LabelSource::Data,
            chunk_bytes: 1 << 19,
            kernels,
        };
        let input = draft.prepare(&plan, WindowRule::Serving, features, slots);
        let (hidden, saved) = draft.forward_keeping(&input, Keep::Activations);
        let (flat, views) = draft.zero_gradients();
        let lm_head_vh = &self.head_vh.to_kind(kind);
        let pass = HeadPass { head: draft.head(), lm_head_vh, gradient: Some(&views.head) };
        let output = objective.evaluate(pass, &hidden, &labels, None);
        draft.backward(output.dhidden_nh, &input, saved, &views, &mut |_| ());
        (output.statistics.report(0.0).loss, flat)
    }
}

#[test]
fn float32_gives_the_gradients_of_float64_on_all_paths() {
    let _draws = alone();
    no_grad(|| {
        tch::manual_seed(3);
        let wide = Draft::new(config(), fresh(config()).to_kind(Kind::Double));
        let row = Row::new(wide.config());
        let dpace = Weighting::Dpace {
            alpha: 0.5,
            confidence: dflash_draft::objective::Confidence::CrossEntropy,
        };
        for weighting in [Weighting::Decay { gamma: 4.0 }, dpace] {
            let (expected_loss, expected) = row.gradient(&wide, (weighting, Kernels::Fast));
            for kernels in [Kernels::Fast, Kernels::Portable, Kernels::Emulated] {
                let narrow =
                    Draft::new(config(), wide.flat().to_kind(Kind::Float)).with_kernels(kernels);
                let (loss, gradient) = row.gradient(&narrow, (weighting, kernels));
                let off = (loss - expected_loss).abs();
                assert!(off < 1e-5 * expected_loss, "{kernels:?}: {loss} {expected_loss}");
                for parameter in narrow.layout().parameters() {
                    let (found, expected) = (parameter.view(&gradient), parameter.view(&expected));
                    let scale = expected.abs().max().double_value(&[]);
                    let off = (found.to_kind(Kind::Double) - expected).abs().max();
                    let off = off.double_value(&[]);
                    assert!(
                        off <= 2e-4 * scale,
                        "{kernels:?} {}: {off} of {scale}",
                        parameter.name
                    );
                }
            }
        }
    });
}

/// Half precision rounds between operations: the fused kernels round less often than libtorch's
/// operations, and must be as close to float64.
#[test]
fn bfloat16_by_the_kernels_for_gpus_is_as_near_float64_as_by_libtorchs_operations() {
    let _draws = alone();
    // The gradients of biases have few numbers each: the randomness of their rounding exceeds the
    // effect tested here.
    let config = || DraftConfig { attention_bias: false, ..config() };
    no_grad(|| {
        tch::manual_seed(3);
        let half = fresh(config()).to_kind(Kind::BFloat16);
        let mut row = Row::new(&config());
        for x in [&mut row.features_tk, &mut row.embedding_vh, &mut row.head_vh] {
            *x = x.to_kind(Kind::BFloat16).to_kind(Kind::Double);
        }
        let run = |flat: Tensor, kernels| {
            let draft = Draft::new(config(), flat).with_kernels(kernels);
            let weighting = Weighting::Decay { gamma: 4.0 };
            (row.gradient(&draft, (weighting, kernels)), draft)
        };
        let ((expected_loss, expected), draft) = run(half.to_kind(Kind::Double), Kernels::Fast);
        let errors = [Kernels::Portable, Kernels::Emulated].map(|kernels| {
            let ((loss, gradient), _) = run(half.shallow_clone(), kernels);
            assert!((loss - expected_loss).abs() < 2e-3 * expected_loss, "{kernels:?}: {loss}");
            let error = |parameter: &dflash_draft::Parameter| {
                let (found, expected) = (parameter.view(&gradient), parameter.view(&expected));
                let off = (found.to_kind(Kind::Double) - &expected).norm() / expected.norm();
                off.double_value(&[])
            };
            draft.layout().parameters().iter().map(error).collect::<Vec<f64>>()
        });
        let [portable, emulated] = errors;
        let names = draft.layout().parameters().iter().map(|parameter| &parameter.name);
        for ((name, portable), emulated) in names.zip(portable).zip(emulated) {
            println!("{name}: {emulated:.2e}, by libtorch's operations {portable:.2e}");
            assert!(emulated < 1.2 * portable + 1e-3, "{name}: {emulated:e}, {portable:e}");
        }
    });
}
