//! What a decoder layer of any family is, and what it runs over.
//!
//! Every product runs over all tokens of a call at once. Only attention and layers with recurrent
//! state know which token belongs to which document or cache, and they reach earlier tokens only
//! through [`Attend`], which has three implementations: packed documents, one growing sequence,
//! several sequences. So a new family works in all three, and a new way of running works for all
//! families. A layer declares what a cache keeps for it: keys and values of any width, a state, or
//! nothing. What distinguishes attentions (span, scale, soft-cap, sinks) is a value passed with the
//! call; parts depend on choices, never on family names.
//!
//! Shapes: `t` tokens, `h` hidden, `n` query heads, `m` key and value heads, `d` head dimension,
//! `e` value head dimension.

use std::collections::HashMap;
use std::fmt::Debug;

use dflash_kernels::decode::LayerWeights;
use dflash_kernels::kernels::{self, Kernels};
use dflash_tensor::attention_span::AttentionPlace;
use dflash_tensor::fused::Norm;
use dflash_tensor::ops::rms_norm;
use tch::{Kind, Tensor};

use super::blocks::latent::Latent;
use super::rotary::HeadTables;

/// One decoder layer.
pub(crate) trait Layer: Debug + Send {
    /// The residual stream after this layer [T, H].
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor;

    /// What it keeps of the tokens before.
    fn memory(&self) -> Memory;

    /// What computes it from now on.
    fn set_kernels(&mut self, _kernels: Kernels) {}

    /// The weights in the form of the packed passes, where they take such a layer.
    fn packed(&self) -> Option<LayerWeights<'_>> {
        None
    }

    /// The parameters as they are trained; none where such layers are not trained here.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// The tensors as a checkpoint stores them, where such layers are saved here.
    fn checkpoint(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}

/// One call's tokens on their way through the layers.
pub(crate) struct Pass<'a> {
    /// Rotary tables of the tokens' positions, one for each kind that the family has.
    pub(crate) tables: &'a [HeadTables],
    /// What the tokens may see.
    pub(crate) attend: &'a mut dyn Attend,
    /// The tokens' positions `[T]`, int64.
    pub(crate) positions_t: &'a Tensor,
    /// What the family makes of the tokens once for all layers (see `Architecture::prepare`).
    pub(crate) prepared: Option<Tensor>,
    /// Keys and values of this pass that later layers look at too, by the layer that made them.
    pub(crate) shared: HashMap<usize, (Tensor, Tensor)>,
}

impl<'a> Pass<'a> {
    /// A pass at its begin.
    pub(crate) fn new(
        tables: &'a [HeadTables],
        positions_t: &'a Tensor,
        attend: &'a mut dyn Attend,
    ) -> Self {
        Self { tables, attend, positions_t, prepared: None, shared: HashMap::new() }
    }
}

/// What a cache holds for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Keys [heads, tokens, key_dim] and values [heads, tokens, value_dim].
    Keys { heads: i64, key_dim: i64, value_dim: i64 },
    /// As keys of one head, whose first `value_dim` numbers are the values too (see [`Latent`]).
    Latent { key_dim: i64, value_dim: i64 },
    /// A state of fixed size (see [`Recurrence`]).
    State,
    /// Nothing of its own.
    Nothing,
}

/// Rotated queries and keys, and values, of the tokens of one call.
#[derive(Debug)]
pub(crate) struct Projected {
    pub(crate) q_tnd: Tensor,
    pub(crate) k_tmd: Tensor,
    pub(crate) v_tme: Tensor,
    /// What computes the attention over them.
    pub(crate) kernels: Kernels,
    /// Whether keys and values lie in the room that [`Attend::room`] gave.
    pub(crate) are_kept: bool,
}

/// The tokens before, for attention and for layers that carry a state: those of the tokens'
/// documents, or of a cache.
pub(crate) trait Attend {
    /// Where the layer's keys and values [T, M, D] of the call's tokens will be kept, for a kernel that can
    /// write them there; `None` where [`Self::attend`] takes them as they come.
    fn room(&self, _layer: usize, _like: &Tensor) -> Option<(Tensor, Tensor)> {
        None
    }

    /// Causal attention's output, heads side by side [T, N*E].
    fn attend(&mut self, place: AttentionPlace<'_>, projected: &Projected) -> Tensor;

    /// As [`Self::attend`], over latents.
    fn attend_latent(&mut self, place: AttentionPlace<'_>, latent: &Latent<'_>) -> Tensor {
        latent.up.values(&self.attend(place, &latent.absorbed()))
    }

    /// The outputs [T, O] of a layer that carries a state, whose inputs are [T, C].
    fn scan(&mut self, layer: usize, recurrence: &dyn Recurrence, inputs_tc: &Tensor) -> Tensor;
}

/// A layer that carries a state from token to token instead of looking back.
pub(crate) trait Recurrence {
    /// The state before the first token.
    fn zero(&self, like: &Tensor) -> State;

    /// The outputs [T, O] of tokens whose inputs are [T, C], after `state`; and the state after them.
    fn run(&self, inputs_tc: &Tensor, state: &State) -> (Tensor, State);
}

/// A state: never written into, so that handles may be kept.
#[derive(Debug)]
pub(crate) struct State(pub(crate) Vec<Tensor>);

impl State {
    /// Another handle.
    pub(crate) fn shared(&self) -> Self {
        Self(self.0.iter().map(Tensor::shallow_clone).collect())
    }

    /// Bytes of its tensors.
    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(|x| x.numel() * x.kind().elt_size_in_bytes()).sum()
    }
}

/// The weight of an RMS norm `[D]`, and its epsilon. In another kind than the activations, a float32
/// weight is multiplied in float32 (see [`super::parameters::Init::norm_plus_one`]).
#[derive(Debug)]
pub(crate) struct RmsNorm {
    pub(crate) weight: Tensor,
    pub(crate) eps: f64,
    pub(crate) kernels: Kernels,
}

impl RmsNorm {
    /// `x / rms(x) * weight` over the last dimension, of the kind of `x`.
    pub(crate) fn of(&self, x: &Tensor) -> Tensor {
        let Self { weight, eps, kernels } = self;
        if weight.kind() == x.kind() {
            return norm(x, Norm { weight, eps: *eps, kernels: *kernels });
        }
        rms_norm(&x.to_kind(Kind::Float), &weight.to_kind(Kind::Float), *eps).to_kind(x.kind())
    }
}

/// RMS norm over the last dimension: in training the differentiable form, else in one sweep.
pub(crate) fn norm(x: &Tensor, Norm { weight, eps, kernels }: Norm<'_>) -> Tensor {
    match () {
        () if kernels.take(x) => kernels::rms_norm(&x.contiguous(), weight, eps),
        () if weight.requires_grad() => rms_norm(x, weight, eps),
        () if kernels.gpu(x).is_some() => Norm { weight, eps, kernels }.of(&x.contiguous()),
        () => x.internal_fused_rms_norm(weight.size(), Some(weight), eps).0,
    }
}
