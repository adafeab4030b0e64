//! What follows attention in a layer: a gated MLP, or a mixture of experts with or without a shared one.

use dflash_torch_sys::kernels::Kernels;
use tch::Tensor;

use super::experts::{Experts, ExpertsSpec, Gated, Router, RouterSpec};
use crate::fields::Fields;
use crate::target::parameters::{Init, Linear, LinearSpec, Outputs, Split};
use crate::{Result, fused};

/// The activation under `key`, by its names in Transformers.
///
/// # Errors
/// One that we do not know.
pub(crate) fn activation(text: &Fields, key: &str, default: &str) -> Result<Gated> {
    match text.text(key)?.as_deref().unwrap_or(default) {
        "silu" | "swish" => Ok(Gated::Silu),
        "gelu_pytorch_tanh" => Ok(Gated::GeluTanh),
        _ => Err(text.refuse(key, "only silu and gelu_pytorch_tanh are supported")),
    }
}

/// Where an MLP's tensors are, and its width.
#[derive(Debug)]
pub(crate) struct MlpSpec<'a> {
    /// Path of the module.
    pub(crate) module: &'a str,
    pub(crate) hidden: i64,
    pub(crate) inner: i64,
    /// Whether the checkpoint has one `gate_up_proj` instead of two projections.
    pub(crate) fused: bool,
    pub(crate) gated: Gated,
}

/// A gated MLP.
#[derive(Debug)]
pub(crate) struct Mlp {
    gate_up: Linear,
    down: Linear,
    gated: Gated,
    kernels: Kernels,
}

impl Mlp {
    pub(crate) fn new(init: &Init, spec: &MlpSpec<'_>) -> Result<Self> {
        let MlpSpec { module, hidden, inner, fused, gated } = *spec;
        let linear = |name, parts: &[(&str, Outputs)], input, split| {
            init.linear(&LinearSpec { module, name, parts, input, bias: false, split })
        };
        let [gate, up] = if fused { ["gate_up_proj"; 2] } else { ["gate_proj", "up_proj"] };
        let parts = [(gate, Outputs::Even(inner)), (up, Outputs::Even(inner))];
        Ok(Self {
            gate_up: linear("gate_up_proj", &parts, hidden, Split::Outputs)?,
            down: linear(
                "down_proj",
                &[("down_proj", Outputs::Even(hidden))],
                inner,
                Split::Inputs,
            )?,
            gated,
            kernels: Kernels::Fast,
        })
    }

    /// Of `x_th` [T, H].
    pub(crate) fn forward(&self, x_th: &Tensor) -> Tensor {
        self.down.apply(&self.inner(x_th))
    }

    /// The same, added to `residual_th` [T, H], which the caller has for itself.
    pub(crate) fn add_onto(&self, residual_th: Tensor, x_th: &Tensor) -> Tensor {
        self.down.add_onto(residual_th, &self.inner(x_th))
    }

    pub(crate) fn set_kernels(&mut self, kernels: Kernels) {
        self.kernels = kernels;
    }

    fn inner(&self, x_th: &Tensor) -> Tensor {
        let gate_up = self.gate_up.apply(x_th);
        match self.gated {
            Gated::Silu => fused::swiglu(&gate_up, self.kernels),
            other => other.apply(&gate_up),
        }
    }
}

/// Experts, and what every token goes through beside them.
#[derive(Debug)]
pub(crate) struct Mixture {
    router: Router,
    experts: Experts,
    shared: Option<SharedExpert>,
}

/// An expert of all tokens.
#[derive(Debug)]
pub(crate) struct SharedExpert {
    pub(crate) mlp: Mlp,
    /// [1, H], of whose product with a token the sigmoid is its share.
    pub(crate) gate_1h: Option<Tensor>,
}

impl Mixture {
    pub(crate) fn new(
        init: &Init,
        router: &RouterSpec<'_>,
        experts: &ExpertsSpec<'_>,
        shared: Option<SharedExpert>,
    ) -> Result<Self> {
        let (router, experts) = (Router::new(init, router)?, Experts::new(init, experts)?);
        Ok(Self { router, experts, shared })
    }

    /// Of `x_th` [T, H].
    pub(crate) fn forward(&self, x_th: &Tensor) -> Tensor {
        let out_th = self.experts.forward(x_th, &self.router.route(x_th));
        match &self.shared {
            None => out_th,
            Some(SharedExpert { mlp, gate_1h: None }) => mlp.add_onto(out_th, x_th),
            Some(SharedExpert { mlp, gate_1h: Some(gate_1h) }) => {
                let share_t1 = x_th.linear(gate_1h, None::<&Tensor>).sigmoid();
                out_th + mlp.forward(x_th) * share_t1
            }
        }
    }
}

/// What follows attention.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one a layer")]
pub(crate) enum FeedForward {
    Dense(Mlp),
    Mixture(Mixture),
}

impl FeedForward {
    /// What it makes of `x_th` [T, H], added to `residual_th` [T, H], which the caller has for itself.
    pub(crate) fn add_onto(&self, residual_th: Tensor, x_th: &Tensor) -> Tensor {
        match self {
            Self::Dense(mlp) => mlp.add_onto(residual_th, x_th),
            Self::Mixture(mixture) => residual_th + mixture.forward(x_th),
        }
    }

    pub(crate) fn set_kernels(&mut self, kernels: Kernels) {
        match self {
            Self::Dense(mlp) => mlp.set_kernels(kernels),
            Self::Mixture(mixture) => {
                if let Some(shared) = &mut mixture.shared {
                    shared.mlp.set_kernels(kernels);
                }
            }
        }
    }
}

/// Elements of the matrices of an MLP, or of an expert.
pub(crate) fn mlp_elements(hidden: i64, inner: i64) -> f64 {
    (3 * hidden * inner) as f64
}
