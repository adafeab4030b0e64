//! The interface of decoder layers, and what they attend to.
//!
//! Every product runs over all tokens of a call at once. Only attention and recurrent layers know
//! which token belongs to which document or cache, and they reach earlier tokens only through
//! [`Attend`], which has three implementations: packed documents, one growing sequence, several
//! sequences. So a new family works with all three, and a new implementation works with all
//! families. A layer declares what a cache keeps for it: keys and values of any width, a state, or
//! nothing. Attention variants (span, scale, soft cap, sinks) are values passed with the call;
//! blocks are configured by choices, never by family names.
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
    /// Returns the residual stream after this layer [T, H].
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor;

    /// What a cache keeps for this layer.
    fn memory(&self) -> Memory;

    /// Selects the implementation.
    fn set_kernels(&mut self, _kernels: Kernels) {}

    /// The weights in the format of the packed passes, if these support the layer.
    fn packed(&self) -> Option<LayerWeights<'_>> {
        None
    }

    /// The trainable parameters; empty if such layers are not trained here.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// The tensors in the checkpoint's format, if such layers are saved here.
    fn checkpoint(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}

/// State of one pass through the layers.
pub(crate) struct Pass<'a> {
    /// Rotary tables for the tokens' positions, one per rotary embedding of the family.
    pub(crate) tables: &'a [HeadTables],
    /// Access to earlier tokens.
    pub(crate) attend: &'a mut dyn Attend,
    /// The tokens' positions `[T]`, int64.
    pub(crate) positions_t: &'a Tensor,
    /// Per-token inputs that the family computes once for all layers (see `Architecture::prepare`).
    pub(crate) prepared: Option<Tensor>,
    /// Keys and values of this pass that later layers reuse, by the layer that computed them.
    pub(crate) shared: HashMap<usize, (Tensor, Tensor)>,
}

impl<'a> Pass<'a> {
    /// Starts a pass.
    pub(crate) fn new(
        tables: &'a [HeadTables],
        positions_t: &'a Tensor,
        attend: &'a mut dyn Attend,
    ) -> Self {
        Self { tables, attend, positions_t, prepared: None, shared: HashMap::new() }
    }
}

/// What a cache keeps for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Keys [heads, tokens, key_dim] and values [heads, tokens, value_dim].
    Keys { heads: i64, key_dim: i64, value_dim: i64 },
    /// Keys of one head, whose first `value_dim` elements are also the values (see [`Latent`]).
    Latent { key_dim: i64, value_dim: i64 },
    /// A state of fixed size (see [`Recurrence`]).
    State,
    /// Nothing.
    Nothing,
}

/// Rotated queries and keys, and values, of a call's tokens.
#[derive(Debug)]
pub(crate) struct Projected {
    pub(crate) q_tnd: Tensor,
    pub(crate) k_tmd: Tensor,
    pub(crate) v_tme: Tensor,
    /// The attention implementation.
    pub(crate) kernels: Kernels,
    /// Whether keys and values have already been written to [`Attend::room`].
    pub(crate) are_kept: bool,
}

/// Access to earlier tokens for attention and recurrent layers: in the document or a cache.
pub(crate) trait Attend {
    /// Where a kernel may directly write the layer's keys and values [T, M, D] of the call's
    /// tokens; `None` if [`Self::attend`] takes them as separate tensors.
    fn room(&self, _layer: usize, _like: &Tensor) -> Option<(Tensor, Tensor)> {
        None
    }

    /// Causal attention output, heads concatenated [T, N*E].
    fn attend(&mut self, place: AttentionPlace<'_>, projected: &Projected) -> Tensor;

    /// [`Self::attend`] over latents.
    fn attend_latent(&mut self, place: AttentionPlace<'_>, latent: &Latent<'_>) -> Tensor {
        latent.up.values(&self.attend(place, &latent.absorbed()))
    }

    /// Outputs [T, O] of a recurrent layer with inputs [T, C].
    fn scan(&mut self, layer: usize, recurrence: &dyn Recurrence, inputs_tc: &Tensor) -> Tensor;
}

/// A layer that carries a state from token to token instead of attending.
pub(crate) trait Recurrence {
    /// The state before the first token.
    fn zero(&self, like: &Tensor) -> State;

    /// Outputs [T, O] for inputs [T, C] after `state`, and the new state.
    fn run(&self, inputs_tc: &Tensor, state: &State) -> (Tensor, State);
}

/// A recurrent state; its tensors are never modified, so they can be shared.
#[derive(Debug)]
pub(crate) struct State(pub(crate) Vec<Tensor>);

impl State {
    /// A shallow clone.
    pub(crate) fn shared(&self) -> Self {
        Self(self.0.iter().map(Tensor::shallow_clone).collect())
    }

    /// Size of its tensors in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(|x| x.numel() * x.kind().elt_size_in_bytes()).sum()
    }
}

/// An RMS norm: weight `[D]` and epsilon. A float32 weight with activations of another type is
/// applied in float32 (see [`super::parameters::Init::norm_plus_one`]).
#[derive(Debug)]
pub(crate) struct RmsNorm {
    pub(crate) weight: Tensor,
    pub(crate) eps: f64,
    pub(crate) kernels: Kernels,
}

impl RmsNorm {
    /// `x / rms(x) * weight` over the last dimension, in the type of `x`.
    pub(crate) fn of(&self, x: &Tensor) -> Tensor {
        let Self { weight, eps, kernels } = self;
        if weight.kind() == x.kind() {
            return norm(x, Norm { weight, eps: *eps, kernels: *kernels });
        }
        rms_norm(&x.to_kind(Kind::Float), &weight.to_kind(Kind::Float), *eps).to_kind(x.kind())
    }
}

/// RMS norm over the last dimension: differentiable in training, otherwise in one sweep.
pub(crate) fn norm(x: &Tensor, Norm { weight, eps, kernels }: Norm<'_>) -> Tensor {
    match () {
        () if kernels.take(x) => kernels::rms_norm(&x.contiguous(), weight, eps),
        () if weight.requires_grad() => rms_norm(x, weight, eps),
        () if kernels.gpu(x).is_some() => Norm { weight, eps, kernels }.of(&x.contiguous()),
        () => x.internal_fused_rms_norm(weight.size(), Some(weight), eps).0,
    }
}
