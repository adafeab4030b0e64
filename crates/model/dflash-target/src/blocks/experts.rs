//! Mixture of experts: the router and the experts.
//!
//! Scores and weights are float32 regardless of the model's type. Tokens are sorted by expert, so
//! each expert's tokens are one product and an expert without tokens costs nothing. Shapes: `t`
//! tokens, `h` hidden, `e` experts, `k` experts per token, `r` rows (a token and one of its
//! experts: t * k), `i` inner width of an expert.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use tch::{Device, Kind, Tensor};

use crate::parallel::Shard;
use crate::parameters::Init;

mod weights;

pub(crate) use weights::{ExpertsSpec, Stored};

/// How a token's experts and their weights (shares) are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Routing {
    /// Experts per token.
    pub(crate) top_k: i64,
    pub(crate) scores: Scores,
    /// Whether a token's shares are normalised to sum to one.
    pub(crate) normalised: bool,
    /// Final factor on the shares.
    pub(crate) scale: f64,
    /// Restriction to groups of experts, if any.
    pub(crate) groups: Option<ExpertGroups>,
}

/// Score function of the router's logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// Logits select; shares are the softmax over the selected experts.
    SoftmaxOfTopK,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// Experts in groups of equal size; only the best `kept` groups take part. A group's score is the
/// sum of its two best experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertGroups {
    pub(crate) count: i64,
    pub(crate) kept: i64,
}

/// What the shares multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weighed {
    /// The experts' inputs.
    Inputs,
    /// The experts' outputs.
    Outputs,
}

/// The experts' gated activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Gated {
    /// `silu(gate) * up`.
    Silu,
    /// `gelu(gate) * up`, with the tanh approximation.
    GeluTanh,
    /// `gate * sigmoid(alpha gate) * (up + 1)`, with gate clamped from above and `up` on both
    /// sides.
    Clamped { alpha: f64, limit: f64 },
}

impl Gated {
    /// Applies it to `gate_up` [.., 2I], gate first; result [.., I].
    pub(crate) fn apply(self, gate_up: &Tensor) -> Tensor {
        let halves = gate_up.chunk(2, -1);
        let (gate, up) = (&halves[0], &halves[1]);
        match self {
            Self::Silu => gate.silu() * up,
            Self::GeluTanh => gate.gelu("tanh") * up,
            Self::Clamped { alpha, limit } => {
                let gate = gate.clamp_max(limit);
                let up = up.clamp(-limit, limit);
                (up + 1.0) * (&gate * (&gate * alpha).sigmoid())
            }
        }
    }
}

/// Tensor names of a router, complete.
#[derive(Debug)]
pub(crate) struct RouterSpec<'a> {
    /// [E, H].
    pub(crate) weight: &'a str,
    /// `[E]`, added to the logits.
    pub(crate) bias: Option<&'a str>,
    /// `[E]`, added to the scores for selection, but not to the shares.
    pub(crate) correction: Option<&'a str>,
    /// `[E]`, factor on each expert's share.
    pub(crate) expert_scale: Option<&'a str>,
    pub(crate) experts: i64,
    pub(crate) hidden: i64,
    pub(crate) routing: Routing,
}

/// The router. Its tensors are float32.
#[derive(Debug)]
pub(crate) struct Router {
    weight_eh: Tensor,
    bias_e: Option<Tensor>,
    correction_e: Option<Tensor>,
    expert_scale_e: Option<Tensor>,
    routing: Routing,
}

/// Each token's experts and their shares.
#[derive(Debug)]
pub(crate) struct Routed {
    /// [T, K], int64.
    pub(crate) experts_tk: Tensor,
    /// [T, K], float32.
    pub(crate) shares_tk: Tensor,
}

impl Router {
    pub(crate) fn new(init: &Init, spec: &RouterSpec) -> Result<Self> {
        let per_expert =
            |name: Option<&str>| name.map(|name| init.float32(name, &[spec.experts])).transpose();
        Ok(Self {
            weight_eh: init.float32(spec.weight, &[spec.experts, spec.hidden])?,
            bias_e: per_expert(spec.bias)?,
            correction_e: per_expert(spec.correction)?,
            expert_scale_e: per_expert(spec.expert_scale)?,
            routing: spec.routing,
        })
    }

    /// Routes the tokens `x_th` [T, H].
    pub(crate) fn route(&self, x_th: &Tensor) -> Routed {
        let Routing { top_k, scores, normalised, scale, groups } = self.routing;
        let logits_te = x_th.to_kind(Kind::Float).linear(&self.weight_eh, self.bias_e.as_ref());
        let scores_te = match scores {
            Scores::Softmax => logits_te.softmax(-1, Kind::Float),
            Scores::SoftmaxOfTopK => logits_te,
            Scores::Sigmoid => logits_te.sigmoid(),
        };
        let mut choice_te = match &self.correction_e {
            Some(correction_e) => &scores_te + correction_e,
            None => scores_te.shallow_clone(),
        };
        if let Some(groups) = groups {
            choice_te = groups.mask(&choice_te);
        }
        let experts_tk = choice_te.topk(top_k, -1, true, true).1;
        let mut shares_tk = scores_te.gather(1, &experts_tk, false);
        if scores == Scores::SoftmaxOfTopK {
            shares_tk = shares_tk.softmax(-1, Kind::Float);
        }
        if normalised {
            // Transformers' constant, for scores that are all zero.
            let sum = shares_tk.sum_dim_intlist([-1i64].as_slice(), true, Kind::Float);
            shares_tk /= sum + 1e-20;
        }
        if scale != 1.0 {
            shares_tk *= scale;
        }
        if let Some(scale_e) = &self.expert_scale_e {
            shares_tk *= scale_e.take(&experts_tk);
        }
        Routed { experts_tk, shares_tk }
    }
}

impl ExpertGroups {
    /// Reads `n_group` and `topk_group` of config.json; `None` if there is a single group.
    pub(crate) fn read(text: &Fields, experts: i64) -> Result<Option<Self>> {
        let count = text.size("n_group")?.unwrap_or(1);
        let kept = text.size("topk_group")?.unwrap_or(1);
        if experts % count != 0 {
            return Err(text.refuse("n_group", "it must divide the number of experts"));
        }
        if kept > count {
            return Err(text.refuse("topk_group", "it is more than n_group"));
        }
        Ok((count > 1).then_some(Self { count, kept }))
    }

    /// `choice_te` [T, E] with minus infinity for experts of dropped groups.
    fn mask(self, choice_te: &Tensor) -> Tensor {
        let size = choice_te.size();
        let grouped = choice_te.view([size[0], self.count, size[1] / self.count]);
        let best = grouped.topk(grouped.size()[2].min(2), -1, true, false).0;
        let merit_tg = best.sum_dim_intlist([-1i64].as_slice(), false, Kind::Float);
        let kept = merit_tg.topk(self.kept, -1, true, false).1;
        let out = Tensor::ones_like(&merit_tg).scatter_value(1, &kept, 0.0).to_kind(Kind::Bool);
        grouped.masked_fill(&out.unsqueeze(-1), f64::NEG_INFINITY).view(size.as_slice())
    }
}

#[derive(Debug)]
pub(crate) struct Experts {
    /// [E, H, 2I]: gate, then up, per expert.
    gate_up_ehi: Tensor,
    /// [E, I, H].
    down_eih: Tensor,
    /// [E, 2I] and [E, H].
    biases: Option<(Tensor, Tensor)>,
    gated: Gated,
    weighed: Weighed,
    /// Assigns experts to ranks.
    shard: Shard,
}

impl Experts {
    /// Weighted sum of the experts' outputs for `x_th` [T, H].
    pub(crate) fn forward(&self, x_th: &Tensor, routed: &Routed) -> Tensor {
        let (kind, top_k) = (x_th.kind(), routed.experts_tk.size()[1]);
        // Stable, so that an expert's rows keep the tokens' order.
        let (expert_r, order_r) = routed.experts_tk.reshape([-1]).sort_stable(true, 0, false);
        if self.shard.is_parallel() {
            return self.parallel(x_th, routed, &expert_r, &order_r);
        }
        let out_rh = self.rows(x_th, routed, expert_r, &order_r);
        let hidden = out_rh.size()[1];
        let of_token = out_rh.index_select(0, &order_r.argsort(0, false));
        let sum = of_token.view([-1, top_k, hidden]).sum_dim_intlist(
            [1i64].as_slice(),
            false,
            Kind::Float,
        );
        sum.to_kind(kind)
    }

    /// [`Self::forward`] for a rank with some of the experts. Their rows are contiguous after
    /// sorting; the other ranks add the rest.
    fn parallel(
        &self,
        x_th: &Tensor,
        routed: &Routed,
        expert_r: &Tensor,
        order_r: &Tensor,
    ) -> Tensor {
        let own = self.gate_up_ehi.size()[0];
        let first = self.shard.start(own);
        let before = |expert: i64| expert_r.lt(expert).sum(Kind::Int64).int64_value(&[]);
        let (start, end) = (before(first), before(first + own));
        let size = [expert_r.size()[0], x_th.size()[1]];
        let mut of_token = Tensor::zeros(size, (Kind::Float, x_th.device()));
        if end > start {
            let order_r = order_r.narrow(0, start, end - start);
            let expert_r = expert_r.narrow(0, start, end - start) - first;
            let out_rh = self.rows(x_th, routed, expert_r, &order_r);
            let _ = of_token.index_copy_(0, &order_r, &out_rh.to_kind(Kind::Float));
        }
        let of_token = of_token.view([x_th.size()[0], -1, size[1]]);
        let partial = of_token.sum_dim_intlist([1i64].as_slice(), false, Kind::Float);
        self.shard.summed(partial).to_kind(x_th.kind())
    }

    /// Weighted outputs [R, H] of the rows `order_r` `[R]` (a token and one of its experts), sorted
    /// by expert.
    fn rows(&self, x_th: &Tensor, routed: &Routed, expert_r: Tensor, order_r: &Tensor) -> Tensor {
        let (kind, top_k) = (x_th.kind(), routed.experts_tk.size()[1]);
        let token_r = order_r.divide_scalar_mode(top_k, "floor");
        let share_r1 = routed.shares_tk.reshape([-1, 1]).index_select(0, order_r);
        let mut x_rh = x_th.index_select(0, &token_r);
        if self.weighed == Weighed::Inputs {
            x_rh = (x_rh.to_kind(Kind::Float) * &share_r1).to_kind(kind);
        }
        let rows = ExpertRows::new(expert_r, &self.gate_up_ehi);
        let biases = self.biases.as_ref();
        let gate_up = rows.product(&x_rh, &self.gate_up_ehi, biases.map(|(gate_up, _)| gate_up));
        let inner = self.gated.apply(&gate_up);
        let mut out_rh = rows.product(&inner, &self.down_eih, biases.map(|(_, down)| down));
        if self.weighed == Weighed::Outputs {
            out_rh = out_rh.to_kind(Kind::Float) * share_r1;
        }
        out_rh
    }
}

/// Rows sorted by expert.
struct ExpertRows {
    /// `[R]`, ascending.
    expert_r: Tensor,
    /// `[E]`, int32: end of each expert's rows.
    ends_e: Tensor,
    /// Experts with rows and their row counts, if the host multiplies them one by one.
    spans: Option<Vec<(i64, i64)>>,
}

impl ExpertRows {
    /// Rows of these experts, ascending, to be multiplied with matrices like `weight_eio`.
    fn new(expert_r: Tensor, weight_eio: &Tensor) -> Self {
        let experts = weight_eio.size()[0];
        let number_e = Tensor::arange(experts, (Kind::Int64, expert_r.device()));
        // By binary search: a histogram on a GPU would make the host wait.
        let ends_e = number_e.searchsorted(&expert_r, true, true, "right", None::<&Tensor>);
        let spans = (!grouped_products(weight_eio)).then(|| spans(&ends_e));
        Self { expert_r, ends_e, spans }
    }

    /// Each row of `x_ri` [R, I] times its expert's matrix in `weight_eio` [E, I, O], plus its bias
    /// in `bias_eo` [E, O].
    fn product(&self, x_ri: &Tensor, weight_eio: &Tensor, bias_eo: Option<&Tensor>) -> Tensor {
        let out_ro = match &self.spans {
            None => x_ri.internal_grouped_mm(weight_eio, Some(&self.ends_e), None, None),
            Some(spans) => {
                let mut start = 0;
                let products = spans.iter().map(|&(expert, rows)| {
                    let own = x_ri.narrow(0, start, rows);
                    start += rows;
                    own.mm(&weight_eio.get(expert))
                });
                Tensor::cat(&products.collect::<Vec<_>>(), 0)
            }
        };
        match bias_eo {
            Some(bias_eo) => out_ro + bias_eo.index_select(0, &self.expert_r),
            None => out_ro,
        }
    }
}

/// Whether libtorch multiplies all experts' rows in one call: on a GPU in bfloat16, with rows that
/// are multiples of 16 bytes.
fn grouped_products(weight_eio: &Tensor) -> bool {
    let size = weight_eio.size();
    matches!(weight_eio.device(), Device::Cuda(_))
        && weight_eio.kind() == Kind::BFloat16
        && size[1] % 8 == 0
        && size[2] % 8 == 0
}

/// Experts with rows, and their row counts.
fn spans(ends_e: &Tensor) -> Vec<(i64, i64)> {
    let ends_e = ends_e.to_device(Device::Cpu).to_kind(Kind::Int64);
    let ends = Vec::<i64>::try_from(ends_e).expect("a flat tensor of integers");
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let counts = starts.zip(&ends).map(|(start, end)| end - start);
    counts
        .enumerate()
        .filter(|(_, rows)| *rows > 0)
        .map(|(expert, rows)| (expert as i64, rows))
        .collect()
}

#[cfg(test)]
mod tests;
