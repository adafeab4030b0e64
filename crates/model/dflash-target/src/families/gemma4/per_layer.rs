//! Gemma 4's per-layer inputs, computed from the tokens in addition to the residual stream.

use dflash_tensor::Result;
use tch::Tensor;

use super::PerLayer;
use crate::TargetConfig;
use crate::blocks::experts::Gated;
use crate::families::Prepare;
use crate::layer::{Pass, RmsNorm};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};

/// A layer's own input, gated by the residual stream and added to it.
#[derive(Debug)]
pub(super) struct PerLayerInput {
    number: i64,
    gated: Gated,
    per_layer_input_gate: Linear,
    per_layer_projection: Linear,
    pub(super) post_per_layer_input_norm: RmsNorm,
}

impl PerLayerInput {
    pub(super) fn new(
        config: &TargetConfig,
        size: i64,
        gated: Gated,
        number: usize,
        module: &str,
        init: &Init,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let linear = |name: &str, input, output| {
            let (parts, split) = (&[(name, Outputs::Even(output))], Split::Whole);
            init.linear(&LinearSpec { module, name, parts, input, bias: false, split })
        };
        let norm = format!("{module}.post_per_layer_input_norm.weight");
        Ok(Self {
            number: number as i64,
            gated,
            per_layer_input_gate: linear("per_layer_input_gate", hidden, size)?,
            per_layer_projection: linear("per_layer_projection", size, hidden)?,
            post_per_layer_input_norm: init.rms_norm(&norm, hidden, config)?,
        })
    }

    pub(super) fn add_to(&self, x_th: &Tensor, pass: &Pass<'_>) -> Tensor {
        let inputs_tlp = pass.prepared.as_ref().expect("made where the pass began");
        let gate_tp = self.per_layer_input_gate.apply(x_th);
        let own_tp = inputs_tlp.select(1, self.number);
        let made = self.gated.apply(&Tensor::cat(&[gate_tp, own_tp], -1));
        x_th + self.post_per_layer_input_norm.of(&self.per_layer_projection.apply(&made))
    }
}

/// The inputs of all layers, from token ids and embeddings.
#[derive(Debug)]
pub(super) struct PerLayerInputs {
    layers: i64,
    size: i64,
    hidden: i64,
    /// [V, L * P].
    embed_tokens_per_layer: Tensor,
    per_layer_model_projection: Linear,
    per_layer_projection_norm: RmsNorm,
}

impl PerLayerInputs {
    /// Names of its tensors.
    pub(super) const NAMES: &'static [&'static str] = &[
        "embed_tokens_per_layer.weight",
        "per_layer_model_projection.weight",
        "per_layer_projection_norm.weight",
    ];

    pub(super) fn new(config: &TargetConfig, per_layer: PerLayer, init: &Init) -> Result<Self> {
        let PerLayer { size, vocab_size } = per_layer;
        let (hidden, layers) = (config.hidden_size, config.num_hidden_layers as i64);
        let projection = init.path("per_layer_model_projection");
        let norm = init.path("per_layer_projection_norm.weight");
        Ok(Self {
            layers,
            size,
            hidden,
            embed_tokens_per_layer: init.matrix(
                &init.path("embed_tokens_per_layer.weight"),
                &[vocab_size, layers * size],
            )?,
            per_layer_model_projection: init.linear(&LinearSpec {
                module: "",
                name: &projection,
                parts: &[(&projection, Outputs::Even(layers * size))],
                input: hidden,
                bias: false,
                split: Split::Whole,
            })?,
            per_layer_projection_norm: init.rms_norm(&norm, size, config)?,
        })
    }
}

impl Prepare for PerLayerInputs {
    /// [T, L, P].
    fn of(&self, ids_t: &Tensor, x_th: &Tensor) -> Tensor {
        let kind = x_th.kind();
        let by_layer = |x: &Tensor| x.view([-1, self.layers, self.size]);
        let scale = Tensor::from((self.size as f64).sqrt()).to_kind(kind);
        let tokens = by_layer(&(self.embed_tokens_per_layer.index_select(0, ids_t) * scale));
        let context = self.per_layer_model_projection.apply(x_th) * (self.hidden as f64).powf(-0.5);
        let context = self.per_layer_projection_norm.of(&by_layer(&context));
        (context + tokens) * 0.5f64.sqrt()
    }
}
