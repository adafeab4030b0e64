//! The training pass over a packed row: a lean forward pass and an explicit backward pass.
//!
//! Per layer the forward pass keeps the residual inputs, the raw projections and the attention
//! result. Norms, rotations and SwiGLU are recomputed in the backward pass, which costs only
//! elementwise work and bounds memory at about `8H + 2I + 2 (heads + kv heads) D` elements per slot
//! and layer. With [`Keep::Inputs`] only the residual input of each layer is kept, H elements per
//! slot and layer, and the backward pass reruns the layer's forward pass except its last product.

use dflash_kernels::gpu;
use dflash_tensor::fused::{self, HeadOrder};
use dflash_tensor::ops::{RotaryTables, accumulate_kind};
use dflash_torch_sys::trace;
use tch::{Device, Kind, Tensor};

use super::{Draft, DraftViews, LayerKind, LayerViews, linear, plus, projection};
use crate::attention::{
    Attended, AttentionGradient, AttentionShape, BlockAttention, BlockPlan, KeyValue, Method,
    Visibility, WindowRule,
};

/// Everything about one packed row that the draft's layers need.
#[derive(Debug)]
pub struct PackedInput {
    /// Target features of the context rows, [C, K*H].
    pub features_ck: Tensor,
    /// Embeddings of [anchor token, MASK, ...] per block, [N, H].
    pub slots_nh: Tensor,
    /// Attention per layer type; `None` for types that the draft does not have, for which the plan
    /// may lack context.
    full: Option<BlockAttention>,
    sliding: Option<BlockAttention>,
    context_rope: RotaryTables,
    slot_rope: RotaryTables,
}

/// What the forward pass keeps of each layer (activation checkpointing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// Everything that the backward pass reads.
    #[default]
    Activations,
    /// The layer's input, from which the backward pass recomputes the rest.
    Inputs,
}

#[derive(Debug)]
struct LayerSaved {
    input_nh: Tensor,
    activations: Option<Activations>,
}

/// Saved activations of a layer, apart from its input.
#[derive(Debug)]
struct Activations {
    qkv: Tensor,
    context_kv: Tensor,
    attended: Attended,
    middle_nh: Tensor,
    gate_up: Tensor,
}

/// Saved state of a forward pass.
#[derive(Debug)]
pub struct Saved {
    fused_ch: Tensor,
    context_ch: Tensor,
    layers: Vec<LayerSaved>,
    last_nh: Tensor,
}

impl Saved {
    /// Bytes kept until the backward pass.
    pub fn bytes(&self) -> usize {
        let mut tensors = vec![&self.fused_ch, &self.context_ch, &self.last_nh];
        for LayerSaved { input_nh, activations } in &self.layers {
            tensors.push(input_nh);
            if let Some(kept) = activations {
                let Activations { qkv, context_kv, attended, middle_nh, gate_up } = kept;
                let Attended { out_jngd, lse_jng } = attended;
                tensors.extend([qkv, context_kv, out_jngd, lse_jng, middle_nh, gate_up]);
            }
        }
        tensors.iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }
}

/// Visibility of layers of `kind` in a draft of `config`, with windows measured by `rule`.
pub(crate) fn visibility(
    config: &super::DraftConfig,
    kind: LayerKind,
    rule: WindowRule,
) -> Visibility {
    match (kind, config.sliding_window) {
        (LayerKind::Sliding, Some(window)) => {
            Visibility { window: Some((window, rule)), causal_in_block: true }
        }
        _ => Visibility::FULL,
    }
}

/// Plans a packed row's blocks for a draft of `config`.
pub fn plan_blocks(
    config: &super::DraftConfig,
    document_starts: &[usize],
    anchors: &[usize],
    rule: WindowRule,
) -> BlockPlan {
    let visibilities: Vec<Visibility> =
        config.layers.iter().map(|&kind| visibility(config, kind, rule)).collect();
    BlockPlan::new(document_starts, anchors, config.block_size, &visibilities)
}

impl Draft {
    /// Prepares attention and rotary tables of a row planned with `rule`.
    ///
    /// `features_ck` [C, K*H] are the features of the plan's context rows, `slots_nh` [N, H] the
    /// slots' embeddings, both on the draft's device and in its type.
    pub fn prepare(
        &self,
        plan: &BlockPlan,
        rule: WindowRule,
        features_ck: Tensor,
        slots_nh: Tensor,
    ) -> PackedInput {
        let (head_dim, device, kind) = (self.config.head_dim, self.flat.device(), self.flat.kind());
        let shape = AttentionShape {
            queries_per_kv: self.config.queries_per_kv(),
            head_dim,
            device,
            kind,
            kernels: self.kernels,
            method: Method::of(device, kind, head_dim, self.kernels),
        };
        let attention = |kind: LayerKind| {
            let visibility = visibility(&self.config, kind, rule);
            let needed = self.config.layers.contains(&kind);
            needed.then(|| BlockAttention::new(plan, &visibility, &shape))
        };
        PackedInput {
            features_ck,
            slots_nh,
            full: attention(LayerKind::Full),
            sliding: attention(LayerKind::Sliding),
            context_rope: self.tables(&plan.context_positions()),
            slot_rope: self.tables(&plan.slot_positions()),
        }
    }

    /// Runs all layers; returns `norm(x)` [N, H], ready for the target's lm_head, and the state for
    /// [`Self::backward`]. `keep` affects memory, not results. Must be called without autograd.
    pub fn forward_keeping(&self, input: &PackedInput, keep: Keep) -> (Tensor, Saved) {
        let part = trace::part("features");
        let fused_ch = linear(&input.features_ck, &self.views.fc);
        let context_ch = self.norm(&self.views.hidden_norm).of(&fused_ch);
        drop(part);
        let mut x_nh = input.slots_nh.shallow_clone();
        let mut layers = Vec::with_capacity(self.views.layers.len());
        for (index, layer) in self.views.layers.iter().enumerate() {
            let attention = input.attention(self, index);
            let activations = self.layer_activations(layer, &x_nh, attention, input, &context_ch);
            let _part = trace::part("mlp");
            let activated = fused::swiglu(&activations.gate_up, self.kernels);
            let output = activations.middle_nh.addmm(&activated, &layer.down.tr());
            let activations = (keep == Keep::Activations).then_some(activations);
            layers.push(LayerSaved { input_nh: x_nh, activations });
            x_nh = output;
        }
        let hidden_nh = self.norm(&self.views.norm).of(&x_nh);
        (hidden_nh, Saved { fused_ch, context_ch, layers, last_nh: x_nh })
    }

    /// A layer's forward pass up to its SwiGLU, which the backward pass recomputes anyway.
    fn layer_activations(
        &self,
        layer: &LayerViews,
        x_nh: &Tensor,
        attention: &BlockAttention,
        input: &PackedInput,
        context_ch: &Tensor,
    ) -> Activations {
        let part = trace::part("projections");
        let biases = layer.biases.as_ref();
        let normed_nh = self.norm(&layer.input_norm).of(x_nh);
        let qkv = projection(&normed_nh, &layer.qkv, biases.map(|bias| &bias.qkv));
        drop(normed_nh);
        let context_kv = projection(context_ch, &layer.kv, biases.map(|bias| &bias.kv));
        let (q_jngd, own) = self.project_slots(layer, &qkv, &input.slot_rope);
        let context = self.project_context(layer, &context_kv, &input.context_rope);
        let inner = trace::part("attention");
        let attended = attention.forward(&q_jngd, &context, &own);
        drop(inner);
        // Permutes a weight instead of all slots.
        let order = attention.head_order();
        let o = self.output_columns(&layer.o, order).flatten(1, -1);
        let out = order.rows(&attended.out_jngd).flatten(1, -1);
        let middle_nh = plus(x_nh.addmm(&out, &o.tr()), biases.map(|bias| &bias.o));
        drop(part);
        let _part = trace::part("mlp");
        let gate_up = linear(&self.norm(&layer.post_norm).of(&middle_nh), &layer.gate_up);
        Activations { qkv, context_kv, attended, middle_nh, gate_up }
    }

    /// Adds the gradients of all parameters for `dhidden_nh` [N, H] to `gradients` (float32 views).
    ///
    /// Activation gradients reuse the memory of saved activations: `saved` and `dhidden_nh` are
    /// consumed, `input` is unchanged.
    ///
    /// `finished` is called with the index of each of the layout's buckets as soon as its gradients
    /// are final, from the last bucket to the first. The head's bucket is already final.
    pub fn backward(
        &self,
        dhidden_nh: Tensor,
        input: &PackedInput,
        saved: Saved,
        gradients: &DraftViews,
        finished: &mut dyn FnMut(usize),
    ) {
        let trunk = self.layout.trunk_buckets();
        (trunk..self.layout.buckets().len()).rev().for_each(&mut *finished);
        let norm = self.norm(&self.views.norm);
        let mut dx_nh = norm.backward(dhidden_nh, &saved.last_nh, None, &gradients.norm);
        finished(trunk - 1);
        let mut dcontext_ch = saved.context_ch.zeros_like();
        for (index, layer_saved) in saved.layers.into_iter().enumerate().rev() {
            let pass = LayerPass {
                draft: self,
                layer: &self.views.layers[index],
                gradient: &gradients.layers[index],
                attention: input.attention(self, index),
                input,
                context_ch: &saved.context_ch,
            };
            dx_nh = pass.backward(&dx_nh, layer_saved, &mut dcontext_ch);
            finished(index + 1);
        }
        let _part = trace::part("features");
        let norm = self.norm(&self.views.hidden_norm);
        let dfused = norm.backward(dcontext_ch, &saved.fused_ch, None, &gradients.hidden_norm);
        accumulate_product(&gradients.fc, &dfused, &input.features_ck);
        finished(0);
    }
}

impl PackedInput {
    fn attention(&self, draft: &Draft, index: usize) -> &BlockAttention {
        let attention = match draft.config.layers[index] {
            LayerKind::Full => &self.full,
            LayerKind::Sliding => &self.sliding,
        };
        attention.as_ref().expect("each kind of layer is prepared")
    }
}

struct LayerPass<'a> {
    draft: &'a Draft,
    layer: &'a LayerViews,
    gradient: &'a LayerViews,
    attention: &'a BlockAttention,
    input: &'a PackedInput,
    context_ch: &'a Tensor,
}

impl LayerPass<'_> {
    /// Gradient of the layer's input, given that of its output.
    fn backward(&self, dy_nh: &Tensor, saved: LayerSaved, dcontext_ch: &mut Tensor) -> Tensor {
        let LayerSaved { input_nh, activations } = saved;
        let activations = activations.unwrap_or_else(|| {
            let Self { draft, layer, attention, input, context_ch, .. } = *self;
            draft.layer_activations(layer, &input_nh, attention, input, context_ch)
        });
        let Activations { qkv, context_kv, attended, middle_nh, gate_up } = activations;
        let dmiddle_nh = self.mlp_backward(dy_nh, &middle_nh, gate_up);
        let dout_jngd = self.output_backward(&dmiddle_nh, &attended);
        let dqkv = self.attention_backward(&dout_jngd, &attended, qkv, context_kv, dcontext_ch);
        let _part = trace::part("projections");
        let (dx_nh, normed) = self.draft.norm(&self.layer.input_norm).backward_again(
            dqkv.matmul(&self.layer.qkv),
            &input_nh,
            &dmiddle_nh,
            &self.gradient.input_norm,
        );
        accumulate_product(&self.gradient.qkv, &dqkv, &normed);
        if let Some(gradient) = &self.gradient.biases {
            accumulate_rows(&gradient.qkv, &dqkv);
        }
        dx_nh
    }

    fn mlp_backward(&self, dy_nh: &Tensor, middle_nh: &Tensor, gate_up: Tensor) -> Tensor {
        let _part = trace::part("mlp");
        let dactivated = dy_nh.matmul(&self.layer.down);
        let (dgate_up, activated) = fused::swiglu_backward(dactivated, gate_up, self.draft.kernels);
        accumulate_product(&self.gradient.down, dy_nh, &activated);
        drop(activated);
        let (dmiddle_nh, normed) = self.draft.norm(&self.layer.post_norm).backward_again(
            dgate_up.matmul(&self.layer.gate_up),
            middle_nh,
            dy_nh,
            &self.gradient.post_norm,
        );
        accumulate_product(&self.gradient.gate_up, &dgate_up, &normed);
        dmiddle_nh
    }

    /// Gradient of the attention result, [kv heads, N, queries, D].
    fn output_backward(&self, dmiddle_nh: &Tensor, attended: &Attended) -> Tensor {
        let _part = trace::part("projections");
        let (draft, order) = (self.draft, self.attention.head_order());
        let out = order.rows(&attended.out_jngd).flatten(1, -1);
        if let Some(gradient) = &self.gradient.biases {
            accumulate_rows(&gradient.o, dmiddle_nh);
        }
        if order == HeadOrder::ByKeyHead {
            accumulate_product(&self.gradient.o, dmiddle_nh, &out);
        } else {
            let columns = draft.output_columns(&self.gradient.o, order);
            let product = dmiddle_nh.tr().matmul(&out);
            accumulate(&columns, &product.view_as(&columns).to_kind(columns.kind()));
        }
        let o = draft.output_columns(&self.layer.o, order);
        let dout = dmiddle_nh.matmul(&o.flatten(1, -1));
        order.seen(&dout.unflatten(1, &o.size()[1..]))
    }

    /// Gradient of the slots' fused projection, in place; the context's part goes to `dcontext_ch`.
    fn attention_backward(
        &self,
        dout_jngd: &Tensor,
        attended: &Attended,
        qkv: Tensor,
        context_kv: Tensor,
        dcontext_ch: &mut Tensor,
    ) -> Tensor {
        let _part = trace::part("projections");
        let draft = self.draft;
        let input = self.input;
        let (q_jngd, own) = draft.project_slots(self.layer, &qkv, &input.slot_rope);
        let context = draft.project_context(self.layer, &context_kv, &input.context_rope);
        let inner = trace::part("attention");
        let gradient = self.attention.backward(dout_jngd, &q_jngd, &context, &own, attended);
        drop(inner);
        self.key_value_backward(&gradient.context, &context_kv, &input.context_rope);
        accumulate_product(&self.gradient.kv, &context_kv, self.context_ch);
        if let Some(gradient) = &self.gradient.biases {
            accumulate_rows(&gradient.kv, &context_kv);
        }
        let _ = dcontext_ch.addmm_(&context_kv, &self.layer.kv);
        self.slots_backward(&gradient, &qkv);
        qkv
    }

    /// Overwrites the slots' fused projection with its gradient.
    fn slots_backward(&self, d: &AttentionGradient, qkv: &Tensor) {
        let (draft, input, gradient) = (self.draft, self.input, self.gradient);
        let (q_norm, k_norm) = (Some(&self.layer.q_norm), &self.layer.k_norm);
        if let Some(projected) = draft.projected(qkv, q_norm, k_norm, &input.slot_rope) {
            let (dq, KeyValue { k_jtd, v_jtd }) = (Some(&d.dq_jngd), &d.own);
            return projected.backward(qkv, dq, k_jtd, v_jtd, &gradient.q_norm, &gradient.k_norm);
        }
        let c = &draft.config;
        let q_width = c.num_attention_heads * c.head_dim;
        draft.norm(&self.layer.q_norm).of_heads_backward(
            &d.dq_jngd,
            qkv.narrow(1, 0, q_width),
            &input.slot_rope,
            &gradient.q_norm,
        );
        let own_kv = qkv.narrow(1, q_width, 2 * c.kv_width());
        self.key_value_backward(&d.own, &own_kv, &input.slot_rope);
    }

    /// Overwrites raw keys and values [T, 2*kv_width] with their gradient.
    fn key_value_backward(&self, d: &KeyValue, raw: &Tensor, rope: &RotaryTables) {
        if let Some(projected) = self.draft.projected(raw, None, &self.layer.k_norm, rope) {
            let (q_norm, k_norm) = (&self.gradient.q_norm, &self.gradient.k_norm);
            return projected.backward(raw, None, &d.k_jtd, &d.v_jtd, q_norm, k_norm);
        }
        let width = self.draft.config.kv_width();
        self.draft.norm(&self.layer.k_norm).of_heads_backward(
            &d.k_jtd.unsqueeze(2),
            raw.narrow(1, 0, width),
            rope,
            &self.gradient.k_norm,
        );
        raw.narrow(1, width, width).copy_(&d.v_jtd.transpose(0, 1).flatten(1, 2));
    }
}

fn accumulate(gradient: &Tensor, addend: &Tensor) {
    let _ = gradient.shallow_clone().g_add_(addend);
}

/// `gradient += ` the row sum of `dy`, for a bias; summed in the gradient's type.
fn accumulate_rows(gradient: &Tensor, dy: &Tensor) {
    accumulate(gradient, &dy.sum_dim_intlist(0i64, false, gradient.kind()));
}

/// `gradient += dy^T x`, for the weight of `y = x W^T`.
pub(super) fn accumulate_product(gradient: &Tensor, dy: &Tensor, x: &Tensor) {
    let dy_t = dy.tr();
    if dy.kind() == gradient.kind() {
        let _ = gradient.shallow_clone().addmm_(&dy_t, x);
    } else if matches!(dy.device(), Device::Cuda(_)) && gradient.kind() == Kind::Float {
        gpu::add_product(gradient, &dy_t, x);
    } else {
        // half-precision products accumulate in float32 within the GEMM, then in the float32
        // gradient
        accumulate(gradient, &dy_t.matmul(x).to_kind(gradient.kind()));
    }
}

impl Draft {
    /// A zeroed float32 gradient buffer and its views.
    pub fn zero_gradients(&self) -> (Tensor, DraftViews) {
        let options = (accumulate_kind(&self.flat), self.flat.device());
        let flat = Tensor::zeros([self.layout.elements()], options);
        let views = DraftViews::new(&self.config, &self.layout, &flat);
        (flat, views)
    }

    /// The device of the weights.
    pub fn device(&self) -> Device {
        self.flat.device()
    }
}
