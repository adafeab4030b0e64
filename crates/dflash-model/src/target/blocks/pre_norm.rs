//! The layer of most families: norm, attention, norm, feed-forward, each half added to the residual
//! stream.

use dflash_torch_sys::kernels::Kernels;
use tch::Tensor;

use super::attention::SelfAttention;
use super::feed_forward::FeedForward;
use crate::target::layer::{Layer, Memory, Pass, RmsNorm};

/// Names are the checkpoint's.
#[derive(Debug)]
pub(crate) struct PreNormLayer {
    pub(crate) input_layernorm: RmsNorm,
    pub(crate) self_attn: SelfAttention,
    pub(crate) post_attention_layernorm: RmsNorm,
    pub(crate) mlp: FeedForward,
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
