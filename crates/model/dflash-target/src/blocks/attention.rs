//! Attention of a layer: projections, head norms, rotation, score options.
//!
//! Shapes: `t` tokens, `h` hidden, `n` query heads, `m` key and value heads, `d` head dimension.

use std::ops::Range;

use dflash_formats::fields::Fields;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::Result;
use dflash_tensor::attention_span::{AttentionPlace, AttentionSpan};
use dflash_tensor::ops::{Scores, accumulate_kind, reciprocal_rms};
use tch::{Kind, Tensor};

use crate::TargetConfig;
use crate::heads::FusedHeads;
use crate::layer::{Memory, Pass, Projected, RmsNorm};
use crate::parallel::{Divisible, Shard};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};

/// Number and size of heads.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heads {
    pub(crate) query: i64,
    pub(crate) key: i64,
    pub(crate) dim: i64,
}

impl Heads {
    /// The sizes that tensor parallelism divides.
    pub(crate) fn parallel_sizes(self) -> Vec<Divisible> {
        vec![
            Divisible::new("num_attention_heads", self.query),
            Divisible { is_repeated: true, ..Divisible::new("num_key_value_heads", self.key) },
        ]
    }

    /// A rank's heads: its share of the query heads, and the key heads that they read.
    pub(crate) fn own(self, shard: &Shard) -> Self {
        let keys = shard.own_keys(self.key);
        Self { query: shard.share(self.query), key: keys.end - keys.start, dim: self.dim }
    }

    /// Outputs of a key or value projection.
    pub(crate) fn keys(self) -> Outputs {
        Outputs::KeyHeads { heads: self.key, dim: self.dim }
    }

    /// Outputs of a query projection.
    pub(crate) fn queries(self) -> Outputs {
        Outputs::Even(self.query_size())
    }

    /// Reads config.json; absent keys take the family's `default`, if any.
    ///
    /// # Errors
    /// A number that is missing, or is not divisible as required.
    pub(crate) fn read(text: &Fields, default: Option<Self>) -> Result<Self> {
        let hidden = text.required("hidden_size", Fields::size)?;
        let query = match default {
            Some(default) => text.size("num_attention_heads")?.unwrap_or(default.query),
            None => text.required("num_attention_heads", Fields::size)?,
        };
        let or = |of: fn(Self) -> i64, own: i64| default.map_or(own, of);
        let key = text.size("num_key_value_heads")?.unwrap_or(or(|heads| heads.key, query));
        let dim = text.size("head_dim")?.unwrap_or(or(|heads| heads.dim, hidden / query));
        if query % key != 0 {
            return Err(text.refuse("num_key_value_heads", "it must divide num_attention_heads"));
        }
        Ok(Self { query, key, dim })
    }

    /// Width of all query heads.
    pub(crate) fn query_size(self) -> i64 {
        self.query * self.dim
    }

    /// Width of all key heads.
    pub(crate) fn key_size(self) -> i64 {
        self.key * self.dim
    }

    /// Elements of the four projections for a `hidden` size.
    pub(crate) fn elements(self, hidden: i64) -> f64 {
        (hidden * (2 * self.query_size() + 2 * self.key_size())) as f64
    }

    /// Operations per query-key pair.
    pub(crate) fn pair_flops(self) -> f64 {
        4.0 * self.query_size() as f64
    }

    /// Activation elements per token around attention, including two residual streams.
    pub(crate) fn widest(self, hidden: i64) -> f64 {
        (2 * hidden + 3 * self.query_size() + 3 * self.key_size()) as f64
    }
}

/// Norms of queries and keys.
#[derive(Debug)]
pub(crate) enum HeadNorms {
    None,
    /// Per head, before the rotation.
    Each {
        query: RmsNorm,
        key: RmsNorm,
    },
    /// Over all heads of a token, before the rotation.
    Together(TogetherNorms),
    /// Per head without a weight, after the rotation.
    Plain {
        eps: f64,
    },
}

impl HeadNorms {
    /// `q_norm` and `k_norm` in `module`, per head.
    pub(crate) fn each(init: &Init, module: &str, dim: i64, config: &TargetConfig) -> Result<Self> {
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), dim, config);
        Ok(Self::Each { query: norm("q_norm")?, key: norm("k_norm")? })
    }

    /// `q_norm` and `k_norm` in `module`, over all heads.
    pub(crate) fn together(
        init: &Init,
        module: &str,
        heads: Heads,
        config: &TargetConfig,
    ) -> Result<Self> {
        let norm = |name: &str, outputs: Outputs| -> Result<RmsNorm> {
            let path = format!("{module}.{name}.weight");
            let norm = init.rms_norm(&path, outputs.whole(), config)?;
            let Range { start, end } = outputs.own(&init.shard);
            Ok(RmsNorm { weight: norm.weight.narrow(0, start, end - start), ..norm })
        };
        Ok(Self::Together(TogetherNorms {
            query: norm("q_norm", heads.queries())?,
            key: norm("k_norm", heads.keys())?,
            heads,
            shard: init.shard.clone(),
        }))
    }

    fn set_kernels(&mut self, with: Kernels) {
        if let Self::Each { query, key } | Self::Together(TogetherNorms { query, key, .. }) = self {
            (query.kernels, key.kernels) = (with, with);
        }
    }
}

/// Norms over all query heads and over all key heads of a token, which may be sharded.
#[derive(Debug)]
pub(crate) struct TogetherNorms {
    /// Weights of the rank's own heads.
    query: RmsNorm,
    key: RmsNorm,
    /// The heads of all ranks.
    heads: Heads,
    shard: Shard,
}

impl TogetherNorms {
    /// Normed queries [T, N*D] and keys [T, M*D].
    fn apply(&self, q: &Tensor, k: &Tensor) -> (Tensor, Tensor) {
        if !self.shard.is_parallel() {
            return (self.query.of(q), self.key.of(k));
        }
        let squares = |x: &Tensor| {
            let kind = accumulate_kind(x);
            x.to_kind(kind).square().sum_dim_intlist([-1i64].as_slice(), true, kind)
        };
        // A key head that several ranks share counts once.
        let holders = self.shard.holders(self.heads.key) as f64;
        let sums_t2 = self.shard.summed(Tensor::cat(&[squares(q), squares(k) / holders], 1));
        let normed = |x: &Tensor, norm: &RmsNorm, (column, size): (i64, i64)| {
            let scale_t1 = (sums_t2.narrow(1, column, 1) / size as f64 + norm.eps).rsqrt();
            let normed = (x.to_kind(accumulate_kind(x)) * scale_t1).to_kind(x.kind());
            (normed * &norm.weight).to_kind(x.kind())
        };
        let sizes = (self.heads.query_size(), self.heads.key_size());
        (normed(q, &self.query, (0, sizes.0)), normed(k, &self.key, (1, sizes.1)))
    }
}

/// Scales queries by position p: `1 + scale ln(1 + floor((p + 1) / floor))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Temperature {
    /// Factor on the logarithm.
    pub(crate) scale: f64,
    /// Number of consecutive positions with the same temperature.
    pub(crate) floor: f64,
}

impl Temperature {
    fn apply(self, q_tnd: &Tensor, positions_t: &Tensor) -> Tensor {
        let steps = ((positions_t.to_kind(Kind::Float) + 1.0) / self.floor).floor();
        let growth_t11 = (steps.log1p() * self.scale + 1.0).view([-1, 1, 1]);
        (q_tnd * growth_t11).to_kind(q_tnd.kind())
    }
}

/// Arguments of [`SelfAttention::new`].
#[derive(Debug)]
pub(crate) struct AttentionSpec<'a> {
    /// Module path.
    pub(crate) module: &'a str,
    /// Layer number, from 0.
    pub(crate) layer: usize,
    pub(crate) hidden: i64,
    pub(crate) heads: Heads,
    pub(crate) attention_span: AttentionSpan,
    /// Index of the rotary embedding in the pass; `None` without rotation.
    pub(crate) rotary: Option<usize>,
    pub(crate) norms: HeadNorms,
    /// Biases of q, k and v, and of o.
    pub(crate) bias: (bool, bool),
    /// Whether the checkpoint has one `qkv_proj` instead of three projections.
    pub(crate) fused: bool,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    /// Whether the layer has attention sinks.
    pub(crate) sinks: bool,
    pub(crate) temperature: Option<Temperature>,
}

#[derive(Debug)]
pub(crate) struct SelfAttention {
    layer: usize,
    heads: Heads,
    attention_span: AttentionSpan,
    rotary: Option<usize>,
    norms: HeadNorms,
    qkv: Linear,
    output: Linear,
    scale: Option<f64>,
    softcap: Option<f64>,
    sinks_n1: Option<Tensor>,
    temperature: Option<Temperature>,
    kernels: Kernels,
}

impl SelfAttention {
    pub(crate) fn new(init: &Init, spec: AttentionSpec<'_>) -> Result<Self> {
        let (module, hidden) = (spec.module, spec.hidden);
        let (query, key) = (spec.heads.queries(), spec.heads.keys());
        let [q, k, v] = if spec.fused { ["qkv_proj"; 3] } else { ["q_proj", "k_proj", "v_proj"] };
        let sinks = || init.matrix(&format!("{module}.sinks"), &[spec.heads.query]);
        let own = |sinks: Tensor| init.shard.own_rows(&sinks, &[spec.heads.query]).unsqueeze(1);
        Ok(Self {
            layer: spec.layer,
            heads: spec.heads.own(&init.shard),
            attention_span: spec.attention_span,
            rotary: spec.rotary,
            norms: spec.norms,
            qkv: init.linear(&LinearSpec {
                module,
                name: "qkv_proj",
                parts: &[(q, query), (k, key), (v, key)],
                input: hidden,
                bias: spec.bias.0,
                split: Split::Outputs,
            })?,
            output: init.linear(&LinearSpec {
                module,
                name: "o_proj",
                parts: &[("o_proj", Outputs::Even(hidden))],
                input: spec.heads.query_size(),
                bias: spec.bias.1,
                split: Split::Inputs,
            })?,
            scale: spec.scale,
            softcap: spec.softcap,
            sinks_n1: spec.sinks.then(sinks).transpose()?.map(own),
            temperature: spec.temperature,
            kernels: Kernels::Fast,
        })
    }

    /// Attention output for the normed tokens `x_th` [T, H], projected to [T, H].
    pub(crate) fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        self.output.apply(&self.attended(x_th, pass))
    }

    /// [`Self::forward`] plus `residual_th` [T, H].
    pub(crate) fn add_to(
        &self,
        residual_th: &Tensor,
        x_th: &Tensor,
        pass: &mut Pass<'_>,
    ) -> Tensor {
        self.output.add_to(residual_th, &self.attended(x_th, pass))
    }

    pub(crate) fn memory(&self) -> Memory {
        let Heads { key, dim, .. } = self.heads;
        Memory::Keys { heads: key, key_dim: dim, value_dim: dim }
    }

    pub(crate) fn set_kernels(&mut self, kernels: Kernels) {
        self.kernels = kernels;
        self.norms.set_kernels(kernels);
    }

    fn attended(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let projected = self.project(x_th, pass);
        let sinks_nr = self.sinks_n1.as_ref();
        let scores = Scores { scale: self.scale, softcap: self.softcap, sinks_nr };
        pass.attend.attend(
            AttentionPlace { layer: self.layer, attention_span: self.attention_span, scores },
            &projected,
        )
    }

    fn project(&self, x_th: &Tensor, pass: &Pass<'_>) -> Projected {
        let Heads { query, key, dim } = self.heads;
        let qkv_to = self.qkv.apply(x_th);
        if let Some(projected) = self.fused(&qkv_to, pass) {
            return projected;
        }
        let part = |start: i64, heads: i64| qkv_to.narrow(1, start * dim, heads * dim);
        let (mut q, mut k) = (part(0, query), part(query, key));
        if let HeadNorms::Together(norms) = &self.norms {
            (q, k) = norms.apply(&q, &k);
        }
        let heads = |x: &Tensor, count: i64| x.view([-1, count, dim]);
        let (mut q_tnd, mut k_tmd) = (heads(&q, query), heads(&k, key));
        if let HeadNorms::Each { query, key } = &self.norms {
            (q_tnd, k_tmd) = (query.of(&q_tnd), key.of(&k_tmd));
        }
        if let Some(tables) = self.rotary.map(|number| &pass.tables[number]) {
            (q_tnd, k_tmd) = (tables.rotate(&q_tnd), tables.rotate(&k_tmd));
        }
        if let HeadNorms::Plain { eps } = self.norms {
            (q_tnd, k_tmd) = (plain_norm(&q_tnd, eps), plain_norm(&k_tmd, eps));
        }
        if let Some(temperature) = self.temperature {
            q_tnd = temperature.apply(&q_tnd, pass.positions_t);
        }
        let v_tme = heads(&part(query + key, key), key);
        Projected { q_tnd, k_tmd, v_tme, kernels: self.kernels, are_kept: false }
    }

    /// Projection, norms and rotation in one launch, if head norms and rotation of whole heads are
    /// all that is needed.
    fn fused(&self, qkv_to: &Tensor, pass: &Pass<'_>) -> Option<Projected> {
        let (norms, eps) = match &self.norms {
            _ if self.temperature.is_some() => return None,
            HeadNorms::None => (None, 0.0),
            HeadNorms::Each { query, key } if query.eps == key.eps => {
                (Some((&query.weight, &key.weight)), query.eps)
            }
            _ => return None,
        };
        let (heads, kernels, tables) = (self.heads, self.kernels, &pass.tables[self.rotary?]);
        let fused = FusedHeads { qkv_to, heads, norms, eps, tables, kernels };
        fused.project(self.layer, &*pass.attend)
    }
}

/// RMS norm without a weight over the last dimension, in the type of `x`.
pub(crate) fn plain_norm(x: &Tensor, eps: f64) -> Tensor {
    let float = x.to_kind(accumulate_kind(x));
    let scale = reciprocal_rms(&float, eps);
    (float * scale).to_kind(x.kind())
}
