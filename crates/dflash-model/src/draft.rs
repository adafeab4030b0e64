//! The DFlash draft model: Qwen3-style layers whose keys and values also come from the target.
//!
//! Dimensions: H hidden, K captured layers, D head dimension. Token embedding and lm_head are the
//! target's and not part of the draft. All parameters live in one flat buffer; [`DraftLayout`]
//! says where, and every weight (or gradient) is a view into such a buffer, so that the optimizer,
//! the collectives and the checkpoint each handle one tensor.

mod config;
mod decode;
mod layout;
mod train;

use std::cell::OnceCell;
use std::path::Path;

use tch::{Device, Kind, Tensor};

pub use config::{DraftConfig, LayerKind};
pub use decode::ContextCache;
use decode::DecodeWeights;
pub use layout::{DraftLayout, DraftViews, LayerViews, Parameter};
pub use train::{Keep, PackedInput, Saved};

use crate::attention::KeyValue;
use crate::checkpoint::{TensorFile, write_safetensors};
use crate::ops::{Rotary, RotaryTables};
use crate::{Error, Result, fused};

/// File that holds the weights of a draft checkpoint.
const WEIGHTS: &str = "model.safetensors";

/// A draft model: configuration, weights and rotary frequencies.
#[derive(Debug)]
pub struct Draft {
    config: DraftConfig,
    layout: DraftLayout,
    flat: Tensor,
    views: DraftViews,
    rotary: Rotary,
    decode: OnceCell<DecodeWeights>,
}

impl Draft {
    /// Wraps a flat parameter buffer of [`DraftLayout::elements`] elements.
    pub fn new(config: DraftConfig, flat: Tensor) -> Self {
        let layout = DraftLayout::new(&config);
        let views = DraftViews::new(&config, &layout, &flat);
        let rotary = Rotary::new(config.head_dim, config.rope_theta, flat.device());
        Self { config, layout, flat, views, rotary, decode: OnceCell::new() }
    }

    /// A freshly initialised draft: matrices normal with `initializer_range`, norms one.
    ///
    /// `normal` fills a tensor of the given shape with standard normal numbers; the caller owns
    /// the generator, so that the same seed gives the same draft on every device.
    pub fn init(
        config: DraftConfig,
        device: Device,
        mut normal: impl FnMut(&[i64]) -> Tensor,
    ) -> Self {
        let layout = DraftLayout::new(&config);
        let flat = Tensor::zeros([layout.elements()], (Kind::Float, device));
        for parameter in layout.parameters() {
            let mut view = parameter.view(&flat);
            if parameter.is_matrix() {
                view.copy_(&(normal(&parameter.shape) * config.initializer_range));
            } else {
                let _ = view.fill_(1.0);
            }
        }
        Self::new(config, flat)
    }

    /// Loads a checkpoint in z-lab's layout (config.json and model.safetensors).
    ///
    /// # Errors
    /// Missing or damaged files, unsupported settings, missing or misshapen tensors: each named.
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self> {
        let config = DraftConfig::load(dir)?;
        let path = dir.join(WEIGHTS);
        if !path.is_file() {
            return Err(Error::MissingFile { dir: dir.into(), file: WEIGHTS.into() });
        }
        let file = TensorFile::open(&path)?;
        let layout = DraftLayout::new(&config);
        let flat = Tensor::zeros([layout.elements()], (kind, device));
        for parameter in layout.parameters() {
            let tensor = file.tensor(&parameter.name, &parameter.shape)?;
            parameter.view(&flat).f_copy_(&tensor)?;
        }
        Ok(Self::new(config, flat))
    }

    /// Writes config.json and model.safetensors (bfloat16) into `dir` in z-lab's layout.
    ///
    /// # Errors
    /// I/O. Each file is whole or absent; for both together write into a pending directory.
    pub fn save(&self, dir: &Path) -> Result<()> {
        self.config.save(dir)?;
        let tensors: Vec<(String, Tensor)> = self
            .layout
            .parameters()
            .iter()
            .map(|parameter| {
                let view = parameter.view(&self.flat).to_device(Device::Cpu);
                (parameter.name.clone(), view.to_kind(Kind::BFloat16).contiguous())
            })
            .collect();
        write_safetensors(&dir.join(WEIGHTS), &tensors)
    }

    /// The configuration.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// Where each parameter lies in the flat buffer.
    pub fn layout(&self) -> &DraftLayout {
        &self.layout
    }

    /// All parameters, `[elements]`.
    pub fn flat(&self) -> &Tensor {
        &self.flat
    }

    /// The context that all layers share: `hidden_norm(fc(features))`.
    ///
    /// `features_tk` [T, K*H], captures concatenated in ascending layer order; result [T, H].
    pub fn context(&self, features_tk: &Tensor) -> Tensor {
        let projected = linear(features_tk, &self.views.fc);
        fused::norm(&projected, (&self.views.hidden_norm, self.config.rms_norm_eps))
    }

    /// Rotary tables of `positions`.
    pub(crate) fn tables(&self, positions: &[i64]) -> RotaryTables {
        self.rotary.tables(&Tensor::from_slice(positions).to_device(self.flat.device()))
    }

    /// Queries [kv heads, N, queries per kv head, D] and own keys and values of projected slots.
    fn project_slots(
        &self,
        layer: &LayerViews,
        qkv: &Tensor,
        rope: &RotaryTables,
    ) -> (Tensor, KeyValue) {
        let c = &self.config;
        let q_width = c.num_attention_heads * c.head_dim;
        let norm = (&layer.q_norm, c.rms_norm_eps);
        let q = qkv.narrow(1, 0, q_width);
        let q_jngd = fused::head_norm_rope(&q, norm, rope, c.num_key_value_heads);
        let own = qkv.narrow(1, q_width, 2 * c.kv_width());
        (q_jngd, self.project_context(layer, &own, rope))
    }

    /// Keys and values of `kv` [T, 2*kv_width]; keys normed and rotated.
    fn project_context(&self, layer: &LayerViews, kv: &Tensor, rope: &RotaryTables) -> KeyValue {
        let c = &self.config;
        let width = c.kv_width();
        let norm = (&layer.k_norm, c.rms_norm_eps);
        let k = fused::head_norm_rope(&kv.narrow(1, 0, width), norm, rope, c.num_key_value_heads);
        let v = heads(&kv.narrow(1, width, width), c.head_dim);
        KeyValue { k_jtd: k.squeeze_dim(2), v_jtd: v.transpose(0, 1) }
    }

    /// [kv heads, N, queries, D] -> contiguous [N, heads * D].
    fn ungroup_queries(&self, x_jngd: &Tensor) -> Tensor {
        let width = self.config.num_attention_heads * self.config.head_dim;
        x_jngd.permute([1, 0, 2, 3]).reshape([-1, width])
    }
}

/// `x W^T` for a weight stored as [out, in].
fn linear(x: &Tensor, weight: &Tensor) -> Tensor {
    x.matmul(&weight.tr())
}

/// [T, heads * D] -> [T, heads, D].
fn heads(x: &Tensor, head_dim: i64) -> Tensor {
    x.unflatten(1, [x.size()[1] / head_dim, head_dim])
}
