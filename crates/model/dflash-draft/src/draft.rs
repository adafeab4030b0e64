//! The DFlash draft model: Qwen3-style layers that also attend to keys and values computed from the
//! target's hidden states.
//!
//! Dimensions: H hidden, K auxiliary layers, D head dimension. Token embedding and lm_head belong
//! to the target and are not part of the draft. All parameters are in one flat buffer laid out by
//! [`DraftLayout`]; every weight (or gradient) is a view of such a buffer, so that the optimizer,
//! the collectives and the checkpoint each handle one tensor.
//!
//! The backward pass is written by hand. Attention merges parts by their log-sum-exp and runs each
//! part's backward pass with the merged result, and the frozen output projection is fused with the
//! loss, so that gradients replace logits in place. Master weights and moments are float32, because
//! small updates vanish in bfloat16.
//!
//! Matrices are initialised from a normal distribution, except `fc`, which starts as the sum of the
//! auxiliary hidden states plus noise. With fully random initialisation, seeds differ by up to ten
//! percent in acceptance after a thousand steps (LOG.md), and this start beats all of them.

mod decode;
#[cfg(test)]
mod fake_cuda;
mod head;
mod heads;
mod layout;
mod loaded;
mod train;

use std::cell::OnceCell;
use std::ops::Range;
use std::path::Path;

use dflash_kernels::gpu::HeadNorms;
use dflash_kernels::kernels::Kernels;
use tch::{Device, Kind, Tensor};

use decode::DecodeWeights;
pub use decode::{ContextCache, ContextPart, PackedDecoder};
pub use dflash_formats::draft::{BlockShape, DraftConfig, HeadFields, LayerKind, Verifier};
use dflash_tensor::checkpoint::{Entry, TensorFile, TensorWriter, pieces};
use dflash_tensor::fused::{HeadOrder, Norm, Projected};
use dflash_tensor::ops::{Rotary, RotaryTables};
use dflash_tensor::{Result, Weights};
pub use head::{
    AuxiliaryLoss, Choose, Head, HeadChunk, HeadConfig, HeadKind, HeadStart, HeadViews, LmHead,
    MetricSums, ProposalBlock, check_head, fresh_head, loss_of_guesses, unservable,
};
pub(crate) use head::{CHECKED_HEAD, head_config};
pub use heads::HEADS;
pub(crate) use heads::dflash::Dflash;
pub use layout::{
    BiasViews, DraftLayout, DraftViews, Fresh, LayerViews, Parameter, ParameterSpec, Role,
};
pub use loaded::LoadedDraft;
pub(crate) use train::visibility;
pub use train::{Keep, PackedInput, Saved, plan_blocks};

use crate::attention::KeyValue;
use crate::rope;

/// Weights file of a draft checkpoint.
const WEIGHTS: &str = "model.safetensors";

/// Root mean square of the noise part of a fresh `fc`'s output, for inputs of size one. The part of
/// the auxiliary states is one if they are uncorrelated, and more otherwise.
const FC_NOISE: f64 = 0.64;

/// A draft model: configuration, weights and rotary frequencies of the trunk, and its head.
#[derive(Debug)]
pub struct Draft {
    config: DraftConfig,
    layout: DraftLayout,
    flat: Tensor,
    views: DraftViews,
    head: Box<dyn Head>,
    rotary: Rotary,
    kernels: Kernels,
    decode: OnceCell<DecodeWeights>,
    /// Packed weights for few rows on a CPU; inner `None` if not supported.
    packed_decoder: OnceCell<Option<PackedDecoder>>,
}

impl Draft {
    /// Wraps a flat parameter buffer of [`DraftLayout::elements`] elements.
    ///
    /// # Panics
    /// If the head was not checked: see [`check_head`].
    pub fn new(config: DraftConfig, flat: Tensor) -> Self {
        let layout = DraftLayout::new(&config);
        let views = DraftViews::new(&config, &layout, &flat);
        let head = head_config(&config).expect(CHECKED_HEAD).build(&views.head);
        let rotary = rope::of_draft(&config, flat.device());
        let (kernels, decode, packed_decoder) = (Kernels::Fast, OnceCell::new(), OnceCell::new());
        Self { config, layout, flat, views, head, rotary, kernels, decode, packed_decoder }
    }

    /// Selects the kernels.
    pub fn with_kernels(self, kernels: Kernels) -> Self {
        Self { kernels, packed_decoder: OnceCell::new(), ..self }
    }

    /// A draft of float32 zeros, to be filled.
    pub fn zeros(config: DraftConfig, device: Device) -> Self {
        let elements = DraftLayout::new(&config).elements();
        Self::new(config, Tensor::zeros([elements], (Kind::Float, device)))
    }

    /// A freshly initialised draft, each parameter according to its [`Fresh`].
    ///
    /// `normal` fills a tensor of the given shape with standard normal values; the caller owns the
    /// generator, so that one seed gives the same draft on every device.
    pub fn init(
        config: DraftConfig,
        device: Device,
        mut normal: impl FnMut(&[i64]) -> Tensor,
    ) -> Self {
        let draft = Self::zeros(config, device);
        for parameter in draft.layout.parameters() {
            let mut view = parameter.view(&draft.flat);
            match parameter.fresh {
                Fresh::Zeros => {}
                Fresh::Ones => drop(view.fill_(1.0)),
                Fresh::MeanOfAuxLayers => view.copy_(&fresh_fc(&normal(&parameter.shape))),
                Fresh::Normal(deviation) => view.copy_(&(normal(&parameter.shape) * deviation)),
            }
        }
        draft
    }

    /// Loads a checkpoint: config.json, and model.safetensors or the shards of its index.
    ///
    /// # Errors
    /// Missing or damaged files, unsupported settings, missing or misshapen tensors (each named).
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self> {
        let config = DraftConfig::load(dir)?;
        check_head(&config)?;
        let weights = Weights::open(dir)?;
        let layout = DraftLayout::new(&config);
        let flat = Tensor::zeros([layout.elements()], (kind, device));
        for parameter in layout.parameters() {
            weights.read_into(&parameter.name, &parameter.view(&flat))?;
        }
        Ok(Self::new(config, flat))
    }

    /// Writes config.json and model.safetensors (bfloat16) into `dir` in z-lab's layout.
    ///
    /// # Errors
    /// I/O. Each file is written atomically; to write both atomically, use a pending directory.
    pub fn save(&self, dir: &Path) -> Result<()> {
        self.config.save(dir, "bfloat16")?;
        self.save_weights(dir, Kind::BFloat16, &[])
    }

    /// Writes only model.safetensors: the parameters in `kind`, and `more` tensors in their own.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_weights(&self, dir: &Path, kind: Kind, more: &[(String, Tensor)]) -> Result<()> {
        let part = |range: Range<i64>| self.flat.narrow(0, range.start, range.end - range.start);
        save_weights(&self.config, dir, kind, more, |range| Ok(part(range)))
    }

    /// [`Self::save`] for the draft whose flat buffer is the tensor `name` of `file`.
    ///
    /// # Errors
    /// I/O, or a file without that tensor.
    pub fn save_stored(
        config: &DraftConfig,
        file: &TensorFile,
        name: &str,
        dir: &Path,
    ) -> Result<()> {
        file.check_shape(name, &[DraftLayout::new(config).elements()])?;
        config.save(dir, "bfloat16")?;
        save_weights(config, dir, Kind::BFloat16, &[], |range| file.part(name, range))
    }

    /// The configuration.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// The head, which turns hidden states into logits and proposals.
    pub fn head(&self) -> &dyn Head {
        &*self.head
    }

    /// The layout of the flat buffer.
    pub fn layout(&self) -> &DraftLayout {
        &self.layout
    }

    /// All parameters, `[elements]`.
    pub fn flat(&self) -> &Tensor {
        &self.flat
    }

    /// The context that all layers share: `hidden_norm(fc(features))`.
    ///
    /// `features_tk` [T, K*H], auxiliary states concatenated in ascending layer order; result [T, H].
    pub fn context(&self, features_tk: &Tensor) -> Tensor {
        let projected = linear(features_tk, &self.views.fc);
        self.norm(&self.views.hidden_norm).of(&projected)
    }

    fn norm<'a>(&self, weight: &'a Tensor) -> Norm<'a> {
        Norm { weight, eps: self.config.rms_norm_eps, kernels: self.kernels }
    }

    pub(crate) fn tables(&self, positions: &[i64]) -> RotaryTables {
        self.rotary.tables(&dflash_tensor::upload(positions, self.flat.device()))
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
        if let Some(projected) = self.projected(qkv, Some(&layer.q_norm), &layer.k_norm, rope) {
            let (q_jngd, k_jtd) = projected.of(qkv);
            let v_jtd = self.values(&qkv.narrow(1, q_width + c.kv_width(), c.kv_width()));
            return (q_jngd.expect("slots have queries"), KeyValue { k_jtd, v_jtd });
        }
        let q = qkv.narrow(1, 0, q_width);
        let q_jngd = self.norm(&layer.q_norm).of_heads(&q, rope, c.num_key_value_heads);
        let own = qkv.narrow(1, q_width, 2 * c.kv_width());
        (q_jngd, self.project_context(layer, &own, rope))
    }

    /// Keys and values from `kv` [T, 2*kv_width]; keys are normed and rotated.
    fn project_context(&self, layer: &LayerViews, kv: &Tensor, rope: &RotaryTables) -> KeyValue {
        let c = &self.config;
        let width = c.kv_width();
        let v_jtd = self.values(&kv.narrow(1, width, width));
        if let Some(projected) = self.projected(kv, None, &layer.k_norm, rope) {
            return KeyValue { k_jtd: projected.of(kv).1, v_jtd };
        }
        let k = kv.narrow(1, 0, width);
        let k = self.norm(&layer.k_norm).of_heads(&k, rope, c.num_key_value_heads);
        KeyValue { k_jtd: k.squeeze_dim(2), v_jtd }
    }

    /// Values of [T, kv_width] by head: a view.
    fn values(&self, v: &Tensor) -> Tensor {
        heads(v, self.config.head_dim).transpose(0, 1)
    }

    /// Head processing of rows like `x`, if the GPU kernels support it.
    fn projected<'a>(
        &self,
        x: &Tensor,
        query: Option<&'a Tensor>,
        key: &'a Tensor,
        rope: &'a RotaryTables,
    ) -> Option<Projected<'a>> {
        let RotaryTables { cos_td: cosine, sin_td: sine } = rope;
        let norms = HeadNorms { query, key, eps: self.config.rms_norm_eps, cosine, sine };
        let kv_heads = self.config.num_key_value_heads;
        self.kernels.gpu(x).map(|runner| Projected { runner, norms, kv_heads })
    }

    /// [kv heads, N, queries, D] -> contiguous [N, heads * D], heads in weight order.
    fn ungroup_queries(&self, x_jngd: &Tensor) -> Tensor {
        let width = self.config.num_attention_heads * self.config.head_dim;
        x_jngd.permute([1, 0, 2, 3]).reshape([-1, width])
    }

    /// The columns of `o_proj` [H, heads * D] in attention's head order, [H, queries, kv heads, D]
    /// or [H, kv heads, queries, D]. A view.
    fn output_columns(&self, o: &Tensor, order: HeadOrder) -> Tensor {
        let c = &self.config;
        let o_hjgd = o.unflatten(1, [c.num_key_value_heads, c.queries_per_kv(), c.head_dim]);
        match order {
            HeadOrder::ByQuery => o_hjgd.transpose(1, 2),
            HeadOrder::ByKeyHead => o_hjgd,
        }
    }
}

/// Writes the parameters, which `part` returns in pieces, and `more` tensors. Those of a wider type
/// come before the parameters, so that each is aligned, and the others after.
fn save_weights(
    config: &DraftConfig,
    dir: &Path,
    kind: Kind,
    more: &[(String, Tensor)],
    part: impl Fn(Range<i64>) -> Result<Tensor>,
) -> Result<()> {
    let layout = DraftLayout::new(config);
    let mut parameters: Vec<&Parameter> = layout.parameters().iter().collect();
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    let own = parameters.iter().map(|parameter| {
        let (name, shape) = (parameter.name.clone(), parameter.shape.clone());
        Entry { name, kind, shape }
    });
    let is_wider =
        |it: &&(String, Tensor)| it.1.kind().elt_size_in_bytes() > kind.elt_size_in_bytes();
    let (wider, others): (Vec<_>, Vec<_>) = more.iter().partition(is_wider);
    let entry = |(name, tensor): &(String, Tensor)| Entry {
        name: name.clone(),
        kind: tensor.kind(),
        shape: tensor.size(),
    };
    let of = |tensors: &[&(String, Tensor)]| -> Vec<Entry> {
        tensors.iter().map(|named| entry(named)).collect()
    };
    let entries: Vec<Entry> = of(&wider).into_iter().chain(own).chain(of(&others)).collect();
    let mut writer = TensorWriter::create(&dir.join(WEIGHTS), &entries)?;
    wider.iter().try_for_each(|(_, tensor)| writer.append(tensor))?;
    for parameter in parameters {
        for range in pieces(parameter.offset..parameter.offset + parameter.elements()) {
            writer.append(&part(range)?)?;
        }
    }
    others.iter().try_for_each(|(_, tensor)| writer.append(tensor))?;
    writer.finish().map(|_| ())
}

/// A fresh `fc` [H, K*H] from standard normal values: the sum of the auxiliary states over sqrt(K),
/// plus noise.
///
/// So the context is the target's residual stream from the first step on, not a random projection
/// of it; LOG.md has the gain. The scale is arbitrary, because `hidden_norm` follows.
fn fresh_fc(normal_hk: &Tensor) -> Tensor {
    let (h, width) = (normal_hk.size()[0], normal_hk.size()[1]);
    let aux_layers = width / h;
    let identity = Tensor::eye(h, (normal_hk.kind(), normal_hk.device()));
    let sum = identity.repeat([1, aux_layers]) / (aux_layers as f64).sqrt();
    sum + normal_hk * (FC_NOISE / (width as f64).sqrt())
}

/// `x W^T` for a weight stored as [out, in].
fn linear(x: &Tensor, weight: &Tensor) -> Tensor {
    x.matmul(&weight.tr())
}

/// `x W^T + b` for a weight stored as [out, in], with an optional bias `[out]`.
fn projection(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    match bias {
        Some(bias) => bias.addmm(x, &weight.tr()),
        None => linear(x, weight),
    }
}

/// `x + b`, with an optional bias of the width of `x`.
fn plus(x: Tensor, bias: Option<&Tensor>) -> Tensor {
    match bias {
        Some(bias) => x + bias,
        None => x,
    }
}

/// [T, heads * D] -> [T, heads, D].
fn heads(x: &Tensor, head_dim: i64) -> Tensor {
    x.unflatten(1, [x.size()[1] / head_dim, head_dim])
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflash_tensor::checkpoint::write_safetensors;
    use dflash_test_support::seeded;

    #[test]
    fn shards_load_as_one_file_does() {
        let _draws = seeded(tch::manual_seed);
        let options = (Kind::Float, Device::Cpu);
        let config = r#"{
            "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
            "rope_theta": 100.0, "vocab_size": 9, "max_position_embeddings": 32, "block_size": 4,
            "dflash_config": {"mask_token_id": 8, "target_layer_ids": [0, 1]}
        }"#;
        let config = DraftConfig::parse(Path::new("config.json"), config).unwrap();
        let draft = Draft::init(config, Device::Cpu, |shape| Tensor::randn(shape, options));
        let (whole, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        draft.save(whole.path()).unwrap();
        draft.config().save(sharded.path(), "bfloat16").unwrap();
        let mut weight_map = serde_json::Map::new();
        for (number, parameters) in draft.layout().parameters().chunks(5).enumerate() {
            let shard = format!("model-{number}.safetensors");
            let tensor = |p: &Parameter| {
                weight_map.insert(p.name.clone(), shard.clone().into());
                (p.name.clone(), p.view(draft.flat()).to_kind(Kind::BFloat16).contiguous())
            };
            let tensors: Vec<_> = parameters.iter().map(tensor).collect();
            write_safetensors(&sharded.path().join(&shard), &tensors).unwrap();
        }
        let index = serde_json::json!({ "weight_map": weight_map }).to_string();
        std::fs::write(sharded.path().join("model.safetensors.index.json"), index).unwrap();
        let load = |dir: &tempfile::TempDir| Draft::load(dir.path(), Device::Cpu, Kind::Float);
        assert_eq!(load(&whole).unwrap().flat(), load(&sharded).unwrap().flat());
    }

    #[test]
    fn a_fresh_fc_passes_the_aux_states_on() {
        let _draws = seeded(tch::manual_seed);
        let options = (Kind::Float, Device::Cpu);
        let (h, aux_layers) = (256, 4);
        let fc = fresh_fc(&Tensor::randn([h, aux_layers * h], options));
        let features = Tensor::randn([64, aux_layers * h], options);
        let sum =
            features.view([-1, aux_layers, h]).sum_dim_intlist([1i64].as_slice(), false, None);
        let noise = linear(&features, &fc) - sum / (aux_layers as f64).sqrt();
        let size = noise.square().mean(None).sqrt().double_value(&[]);
        assert!((size - FC_NOISE).abs() < 0.02, "{size}");
    }
}
