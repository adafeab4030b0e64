//! The usual layer: norm, attention, norm, feed-forward, each half added to the residual.

use dflash_kernels::kernels::Kernels;
use dflash_tensor::Result;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::ops::Rotary;
use dflash_tensor::rope::Rope;
use tch::{Device, Tensor};

use super::attention::{AttentionSpec, HeadNorms, Heads, SelfAttention, Temperature};
use super::feed_forward::{FeedForward, FeedForwardSpec};
use crate::TargetConfig;
use crate::families::Architecture;
use crate::layer::{Layer, Memory, Pass, RmsNorm};
use crate::parallel::{Divisible, Shard};
use crate::parameters::Init;

/// Dimensions and choices of a family with such layers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PreNormFamily {
    pub(crate) heads: Heads,
    /// Biases of q, k and v, and of o.
    pub(crate) bias: (bool, bool),
    /// Whether the checkpoint has one `qkv_proj` instead of three projections.
    pub(crate) fused: bool,
    /// Head norms in layers with rotary embedding.
    pub(crate) norms: NormsOfHeads,
    /// Whether layers have attention sinks.
    pub(crate) sinks: bool,
    /// For layers without rotary embedding.
    pub(crate) temperature: Option<Temperature>,
    pub(crate) rope: Rope,
    pub(crate) layers: Vec<LayerChoice>,
    /// Module of the feed-forward part.
    pub(crate) module: &'static str,
    pub(crate) feed_forward: FeedForwardSpec,
}

/// Per-layer choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerChoice {
    pub(crate) attention_span: AttentionSpan,
    /// Whether queries and keys are rotated.
    pub(crate) rotates: bool,
    /// Whether the layer has experts.
    pub(crate) is_sparse: bool,
}

/// Head norms: see [`HeadNorms`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormsOfHeads {
    None,
    Each,
    Together,
    Plain,
}

impl PreNormFamily {
    /// Identical layers, full attention, no biases or head norms; families override this.
    pub(crate) fn new(
        layers: usize,
        heads: Heads,
        rope: Rope,
        feed_forward: FeedForwardSpec,
    ) -> Self {
        let is_sparse = feed_forward.routing.is_some();
        Self {
            heads,
            bias: (false, false),
            fused: false,
            norms: NormsOfHeads::None,
            sinks: false,
            temperature: None,
            rope,
            layers: vec![
                LayerChoice {
                    attention_span: AttentionSpan::All,
                    rotates: true,
                    is_sparse
                };
                layers
            ],
            module: "mlp",
            feed_forward,
        }
    }

    /// Sets each layer's attention span.
    pub(crate) fn with_attention_spans(
        mut self,
        attention_spans: impl IntoIterator<Item = AttentionSpan>,
    ) -> Self {
        self.layers
            .iter_mut()
            .zip(attention_spans)
            .for_each(|(layer, attention_span)| layer.attention_span = attention_span);
        self
    }

    /// Sets which layers have experts.
    pub(crate) fn with_experts(mut self, sparse: impl IntoIterator<Item = bool>) -> Self {
        self.layers.iter_mut().zip(sparse).for_each(|(layer, sparse)| layer.is_sparse = sparse);
        self
    }

    fn norms(&self, init: &Init, module: &str, config: &TargetConfig) -> Result<HeadNorms> {
        match self.norms {
            NormsOfHeads::None => Ok(HeadNorms::None),
            NormsOfHeads::Each => HeadNorms::each(init, module, self.heads.dim, config),
            NormsOfHeads::Together => HeadNorms::together(init, module, self.heads, config),
            NormsOfHeads::Plain => Ok(HeadNorms::Plain { eps: config.rms_norm_eps }),
        }
    }
}

impl Architecture for PreNormFamily {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let within = |part: &str| init.path(&format!("layers.{number}.{part}"));
        let LayerChoice { attention_span, rotates, is_sparse } = self.layers[number];
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&within(&format!("{name}.weight")), hidden, config);
        let attention = within("self_attn");
        let input_layernorm = norm("input_layernorm")?;
        let norms = if rotates { self.norms(init, &attention, config)? } else { HeadNorms::None };
        let self_attn = SelfAttention::new(
            init,
            AttentionSpec {
                module: &attention,
                layer: number,
                hidden,
                heads: self.heads,
                attention_span,
                rotary: rotates.then_some(0),
                norms,
                bias: self.bias,
                fused: self.fused,
                scale: None,
                softcap: None,
                sinks: self.sinks,
                temperature: self.temperature.filter(|_| !rotates),
            },
        )?;
        let post_attention_layernorm = norm("post_attention_layernorm")?;
        let mlp = self.feed_forward.read(init, &within(self.module), hidden, is_sparse)?;
        Ok(Box::new(PreNormLayer { input_layernorm, self_attn, post_attention_layernorm, mlp }))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        let (hidden, sizes) = (config.hidden_size, self.feed_forward.sizes);
        self.heads.elements(hidden) + sizes.active_params(hidden, self.layers[number].is_sparse)
    }

    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let (hidden, sizes) = (config.hidden_size, self.feed_forward.sizes);
        let attention = self.heads.own(shard).elements(hidden);
        attention + sizes.stored_params(hidden, self.layers[number].is_sparse, shard)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        self.heads.pair_flops()
    }

    fn attention_span(&self, number: usize) -> AttentionSpan {
        self.layers[number].attention_span
    }

    fn parallel_sizes(&self) -> Vec<Divisible> {
        [self.heads.parallel_sizes(), self.feed_forward.sizes.parallel_sizes()].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        let hidden = config.hidden_size;
        self.heads.widest(hidden).max(self.feed_forward.sizes.widest(hidden))
    }
}

/// Field names are the checkpoint's.
#[derive(Debug)]
struct PreNormLayer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

impl Layer for PreNormLayer {
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let x_th = self.self_attn.add_to(x_th, &self.input_layernorm.of(x_th), pass);
        let normed = self.post_attention_layernorm.of(&x_th);
        self.mlp.add_onto(x_th, &normed)
    }

    fn memory(&self) -> Memory {
        self.self_attn.memory()
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        self.input_layernorm.kernels = kernels;
        self.self_attn.set_kernels(kernels);
        self.post_attention_layernorm.kernels = kernels;
        self.mlp.set_kernels(kernels);
    }
}
