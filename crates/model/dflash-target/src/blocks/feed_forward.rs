//! Feed-forward part of a layer: a gated MLP, or experts with an optional shared expert.

use dflash_formats::fields::Fields;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::{Result, fused};
use tch::Tensor;

use super::experts::{Experts, ExpertsSpec, Gated, Router, RouterSpec, Routing, Stored, Weighed};
use crate::parallel::{Divisible, Shard};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};

/// Reads the activation under `key`, by its names in Transformers.
///
/// # Errors
/// An unknown activation.
pub(crate) fn activation(text: &Fields, key: &str, default: &str) -> Result<Gated> {
    match text.text(key)?.as_deref().unwrap_or(default) {
        "silu" | "swish" => Ok(Gated::Silu),
        "gelu_pytorch_tanh" => Ok(Gated::GeluTanh),
        _ => Err(text.refuse(key, "only silu and gelu_pytorch_tanh are supported")),
    }
}

/// Tensor names and width of an MLP.
#[derive(Debug)]
pub(crate) struct MlpSpec<'a> {
    /// Module path.
    pub(crate) module: &'a str,
    pub(crate) hidden: i64,
    pub(crate) inner: i64,
    /// Whether the checkpoint has one `gate_up_proj` instead of two projections.
    pub(crate) fused: bool,
    pub(crate) gated: Gated,
}

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

    /// Output for `x_th` [T, H].
    pub(crate) fn forward(&self, x_th: &Tensor) -> Tensor {
        self.down.apply(&self.inner(x_th))
    }

    /// [`Self::forward`] added to `residual_th` [T, H], in place.
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

/// Experts, and an optional shared expert.
#[derive(Debug)]
pub(crate) struct Mixture {
    router: Router,
    experts: Experts,
    shared: Option<SharedExpert>,
}

/// An expert that processes all tokens.
#[derive(Debug)]
struct SharedExpert {
    mlp: Mlp,
    /// [1, H]; the sigmoid of its product with a token is the expert's share.
    gate_1h: Option<Tensor>,
}

impl Mixture {
    /// Output for `x_th` [T, H].
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

/// The feed-forward part of a layer.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one a layer")]
pub(crate) enum FeedForward {
    Dense(Mlp),
    Mixture(Mixture),
}

impl FeedForward {
    /// Output for `x_th` [T, H] added to `residual_th` [T, H], in place.
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

/// Number and widths of a family's experts and MLPs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MixtureSizes {
    /// Experts per layer.
    pub(crate) experts: i64,
    /// Experts per token.
    pub(crate) top_k: i64,
    /// Inner width of an expert.
    pub(crate) inner: i64,
    /// Width of the shared expert; 0 without one.
    pub(crate) shared: i64,
    /// Width of the MLP in layers without experts.
    pub(crate) dense: i64,
}

impl MixtureSizes {
    /// Matrix elements that are active for a token, at hidden size `hidden`.
    pub(crate) fn active_params(self, hidden: i64, is_sparse: bool) -> f64 {
        self.elements(hidden, is_sparse, self.top_k, &Shard::WHOLE)
    }

    /// Matrix elements that a rank with `shard` stores; the router is replicated.
    pub(crate) fn stored_params(self, hidden: i64, is_sparse: bool, shard: &Shard) -> f64 {
        self.elements(hidden, is_sparse, shard.share(self.experts), shard)
    }

    fn elements(self, hidden: i64, is_sparse: bool, experts: i64, shard: &Shard) -> f64 {
        if !is_sparse {
            return mlp_elements(hidden, shard.share(self.dense));
        }
        let router = (hidden * self.experts) as f64;
        router
            + mlp_elements(hidden, shard.share(self.shared))
            + experts as f64 * mlp_elements(hidden, self.inner)
    }

    /// The sizes that tensor parallelism divides: experts, and MLP widths.
    pub(crate) fn parallel_sizes(self) -> Vec<Divisible> {
        let sizes = [
            Divisible::new("the number of experts", self.experts),
            Divisible::new("the shared expert's width", self.shared),
            Divisible::new("intermediate_size", self.dense),
        ];
        sizes.into_iter().filter(|divisible| divisible.size > 0).collect()
    }

    /// Peak activation elements per token: inputs, inner activations and outputs of its experts.
    pub(crate) fn widest(self, hidden: i64) -> f64 {
        let sparse = 4 * hidden + self.top_k * (2 * hidden + 3 * self.inner) + 3 * self.shared;
        sparse.max(4 * hidden + 3 * self.dense) as f64
    }
}

/// Feed-forward parts of a family's layers, some of which may have experts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FeedForwardSpec {
    pub(crate) sizes: MixtureSizes,
    /// Whether the checkpoint fuses an MLP's gate and up projections into `gate_up_proj`.
    pub(crate) fused: bool,
    pub(crate) gated: Gated,
    /// Routing, if there are experts.
    pub(crate) routing: Option<Routing>,
    pub(crate) stored: MixtureStorage,
}

/// Tensor names and storage of a mixture; names are relative to its module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MixtureStorage {
    pub(crate) router: &'static str,
    pub(crate) router_bias: Option<&'static str>,
    /// Added to the scores for selection, but not to the shares.
    pub(crate) correction: Option<&'static str>,
    /// Names of an expert's gate, up and down.
    pub(crate) experts: [&'static str; 3],
    pub(crate) layout: Stored,
    /// Whether experts have biases.
    pub(crate) bias: bool,
    pub(crate) weighed: Weighed,
    /// Module of the shared expert, if its width is not 0.
    pub(crate) shared: &'static str,
    /// Gate of the shared expert.
    pub(crate) shared_gate: Option<&'static str>,
}

impl MixtureStorage {
    /// The most common names.
    pub(crate) const USUAL: Self = Self {
        router: "gate.weight",
        router_bias: None,
        correction: None,
        experts: ["gate_proj", "up_proj", "down_proj"],
        layout: Stored::OutputsFirst,
        bias: false,
        weighed: Weighed::Outputs,
        shared: "shared_expert",
        shared_gate: None,
    };
}

impl FeedForwardSpec {
    /// An MLP in every layer.
    pub(crate) fn mlp(inner: i64, gated: Gated) -> Self {
        let sizes = MixtureSizes { experts: 0, top_k: 0, inner: 0, shared: 0, dense: inner };
        let stored = MixtureStorage::USUAL;
        Self { sizes, fused: false, gated, routing: None, stored }
    }

    /// Reads a layer's tensors from `module`, with experts if it `is_sparse`.
    pub(crate) fn read(
        &self,
        init: &Init,
        module: &str,
        hidden: i64,
        is_sparse: bool,
    ) -> Result<FeedForward> {
        let (sizes, stored, gated) = (self.sizes, self.stored, self.gated);
        let mlp = |module: &str, inner| {
            Mlp::new(init, &MlpSpec { module, hidden, inner, fused: self.fused, gated })
        };
        let Some(routing) = self.routing.filter(|_| is_sparse) else {
            return Ok(FeedForward::Dense(mlp(module, sizes.dense)?));
        };
        let within = |name: &str| format!("{module}.{name}");
        let gate = |name: &str| init.matrix(&within(name), &[1, hidden]);
        let shared = || -> Result<SharedExpert> {
            let mlp = mlp(&within(stored.shared), sizes.shared)?;
            Ok(SharedExpert { mlp, gate_1h: stored.shared_gate.map(gate).transpose()? })
        };
        let (bias, correction) = (stored.router_bias.map(within), stored.correction.map(within));
        let router = RouterSpec {
            weight: &within(stored.router),
            bias: bias.as_deref(),
            correction: correction.as_deref(),
            expert_scale: None,
            experts: sizes.experts,
            hidden,
            routing,
        };
        let experts = ExpertsSpec {
            module: &within("experts"),
            names: stored.experts,
            stored: stored.layout,
            experts: sizes.experts,
            hidden,
            inner: sizes.inner,
            bias: stored.bias,
            gated,
            weighed: stored.weighed,
        };
        let shared = (sizes.shared > 0).then(shared).transpose()?;
        let (router, experts) = (Router::new(init, &router)?, Experts::new(init, &experts)?);
        Ok(FeedForward::Mixture(Mixture { router, experts, shared }))
    }
}

/// Matrix elements of an MLP or expert.
pub(crate) fn mlp_elements(hidden: i64, inner: i64) -> f64 {
    (3 * hidden * inner) as f64
}
