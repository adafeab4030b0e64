//! A whole packed row at a realistic shape: float32 on both paths (kernels, flash attention, chunks,
//! threads; libtorch's operations) gives the loss and every gradient of float64.

use dflash_model::Kernels;
use dflash_model::attention::WindowRule;
use dflash_model::draft::{Draft, DraftConfig, Keep, LayerKind};
use dflash_model::objective::{
    BlockLabels, Denominator, ElementLoss, LabelSource, LabelledRow, Objective, Weighting,
};
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
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
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
    }
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
                [TOKENS as i64, config.captures() * config.hidden_size],
                wide,
            ),
            embedding_vh: Tensor::randn([VOCABULARY, config.hidden_size], wide) * 0.1,
            head_vh: Tensor::randn([VOCABULARY, config.hidden_size], wide) * 0.1,
        }
    }

    /// Loss and flat gradient of its numerator.
    fn gradient(&self, draft: &Draft, (weighting, kernels): (Weighting, Kernels)) -> (f64, Tensor) {
        let (config, kind) = (draft.config(), draft.flat().kind());
        let plan = config.plan(&self.starts, &self.anchors, WindowRule::Serving);
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
        let labels = BlockLabels::new(labelled, &self.anchors, config.block_size, None);
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
        let output = objective.evaluate(&hidden, &self.head_vh.to_kind(kind), &labels, None);
        let (flat, views) = draft.zero_gradients();
        draft.backward(output.dhidden_nh, &input, saved, (&views, &mut |_| ()));
        (output.statistics.report(0.0).loss, flat)
    }
}

#[test]
fn float32_gives_the_gradients_of_float64_on_both_paths() {
    no_grad(|| {
        tch::manual_seed(3);
        let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let wide = Draft::init(config(), Device::Cpu, normal);
        let wide = Draft::new(config(), wide.flat().to_kind(Kind::Double));
        let row = Row::new(wide.config());
        let dpace = Weighting::Dpace {
            alpha: 0.5,
            confidence: dflash_model::objective::Confidence::CrossEntropy,
        };
        for weighting in [Weighting::Decay { gamma: 4.0 }, dpace] {
            let (expected_loss, expected) = row.gradient(&wide, (weighting, Kernels::Fast));
            for kernels in [Kernels::Fast, Kernels::Portable] {
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
