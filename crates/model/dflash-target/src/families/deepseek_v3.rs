//! DeepSeek-V3, V3.1 and R1, Kimi K2 and the text model of Kimi K2.5: latent attention with YaRN, a
//! few dense layers, then grouped experts with sigmoid scores and shared experts.
//!
//! Shapes: `t` tokens, `h` hidden, `n` heads, `k` and `r` the parts of a key without and with
//! rotation, `l` latent, `v` value of a head.

use dflash_formats::fields::Fields;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::Result;
use dflash_tensor::attention_span::{AttentionPlace, AttentionSpan};
use dflash_tensor::ops::{Pairs, Rotary, Scores};
use dflash_tensor::rope::{Rope, RopeKeys, Scaling, rope_parameters, yarn_mscale};
use tch::{Device, Tensor};

use super::{Architecture, Known, experts_count};
use crate::blocks::experts::{ExpertGroups, Routing, Scores as Choice};
use crate::blocks::feed_forward::{
    FeedForward, FeedForwardSpec, MixtureSizes, MixtureStorage, activation,
};
use crate::blocks::latent::{Latent, LatentUp};
use crate::facts::HeadFacts;
use crate::layer::{Layer, Memory, Pass, RmsNorm};
use crate::parallel::{Divisible, Shard};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};
use crate::{Outer, TargetConfig};

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"],
    model_types: &["deepseek_v3", "kimi_k2", "kimi_k25"],
    head: HeadFacts::rms(1e-6),
    read: |text| Ok((DeepseekV3Config::read(text)?.into(), Outer::PLAIN)),
}];

/// Dimensions and choices. Field names follow Hugging Face where it has one.
#[derive(Debug, Clone, PartialEq)]
struct DeepseekV3Config {
    num_attention_heads: i64,
    /// Rank of the query projection, if it is low-rank.
    q_lora_rank: Option<i64>,
    kv_lora_rank: i64,
    qk_nope_head_dim: i64,
    qk_rope_head_dim: i64,
    v_head_dim: i64,
    attention_bias: bool,
    rope: Rope,
    /// Factor on the scale of the scores: the square of YaRN's factor.
    score_factor: f64,
    /// Number of leading layers without experts.
    first_k_dense_replace: usize,
    feed_forward: FeedForwardSpec,
}

/// Epsilon of the latent norms, Transformers' default regardless of config.json.
const LATENT_EPS: f64 = 1e-6;

impl DeepseekV3Config {
    /// Reads config.json.
    fn read(text: &Fields) -> Result<Self> {
        let size = |key| text.required(key, Fields::size);
        for (key, only) in [("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")] {
            if text.text(key)?.is_some_and(|found| found != only) {
                return Err(text.refuse(key, &format!("only {only} is supported")));
            }
        }
        if text.size("moe_layer_freq")?.is_some_and(|every| every != 1) {
            return Err(text.refuse("moe_layer_freq", "only 1 is supported"));
        }
        let heads = size("num_attention_heads")?;
        if text.size("num_key_value_heads")?.is_some_and(|keys| keys != heads) {
            let expected = "latent attention has as many as num_attention_heads";
            return Err(text.refuse("num_key_value_heads", expected));
        }
        let rotated = size("qk_rope_head_dim")?;
        let neighbours = text.flag_or("rope_interleave", true)?;
        let (rope, score_factor) =
            rope(text, rotated, if neighbours { Pairs::Neighbours } else { Pairs::Halves })?;
        let inner = size("moe_intermediate_size")?;
        let sizes = MixtureSizes {
            experts: experts_count(text, &["n_routed_experts", "num_local_experts"])?,
            top_k: size("num_experts_per_tok")?,
            inner,
            shared: inner * text.token("n_shared_experts")?.unwrap_or(1).max(0),
            dense: size("intermediate_size")?,
        };
        let dense_layers = text.token("first_k_dense_replace")?.unwrap_or(3);
        Ok(Self {
            num_attention_heads: heads,
            q_lora_rank: text.size("q_lora_rank")?,
            kv_lora_rank: size("kv_lora_rank")?,
            qk_nope_head_dim: size("qk_nope_head_dim")?,
            qk_rope_head_dim: rotated,
            v_head_dim: size("v_head_dim")?,
            attention_bias: text.flag("attention_bias")?,
            rope,
            score_factor,
            first_k_dense_replace: dense_layers.max(0) as usize,
            feed_forward: FeedForwardSpec {
                sizes,
                fused: false,
                gated: activation(text, "hidden_act", "silu")?,
                routing: Some(Routing {
                    top_k: sizes.top_k,
                    scores: Choice::Sigmoid,
                    normalised: text.flag_or("norm_topk_prob", true)?,
                    scale: text.number("routed_scaling_factor")?.unwrap_or(2.5),
                    groups: groups(text, sizes.experts)?,
                }),
                stored: MixtureStorage {
                    correction: Some("gate.e_score_correction_bias"),
                    shared: "shared_experts",
                    ..MixtureStorage::USUAL
                },
            },
        })
    }

    /// Size of a query or key.
    fn query_dim(&self) -> i64 {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Cached elements per token.
    fn kept(&self) -> i64 {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    fn is_sparse(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace
    }

    /// Matrix elements of a rank's attention; the latent projections are replicated.
    fn attention_elements(&self, hidden: i64, shard: &Shard) -> f64 {
        let heads = shard.share(self.num_attention_heads);
        let query = heads * self.query_dim();
        let queries = self.q_lora_rank.map_or(hidden * query, |rank| rank * (hidden + query));
        let up = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim);
        (queries + hidden * self.kept() + up + heads * self.v_head_dim * hidden) as f64
    }
}

/// The rotary embedding, and the factor on the scale of the scores.
fn rope(text: &Fields, head_dim: i64, pairs: Pairs) -> Result<(Rope, f64)> {
    let parameters = rope_parameters(text)?;
    let mscale = parameters.as_ref().map_or(Ok(None), |inner| inner.number("mscale_all_dim"))?;
    let keys = RopeKeys { text, parameters, head_dim, theta: 10_000.0, partial: 1.0, pairs };
    let rope = Rope::read(keys)?;
    let factor = match &rope.scaling {
        Scaling::Yarn(yarn) => yarn_mscale(yarn.factor, mscale.unwrap_or(0.0)).powi(2),
        _ => 1.0,
    };
    Ok((rope, factor))
}

/// Groups of experts, unless all are kept. Transformers' defaults are eight groups, four kept.
fn groups(text: &Fields, experts: i64) -> Result<Option<ExpertGroups>> {
    let count = text.size("n_group")?.unwrap_or(8);
    let kept = text.size("topk_group")?.unwrap_or(4);
    if experts % count != 0 {
        return Err(text.refuse("n_group", "it must divide the number of experts"));
    }
    Ok((kept < count).then_some(ExpertGroups { count, kept }))
}

impl Architecture for DeepseekV3Config {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        Ok(Box::new(DeepseekV3Layer::new(config, self, number, init)?))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        let hidden = config.hidden_size;
        self.attention_elements(hidden, &Shard::WHOLE)
            + self.feed_forward.sizes.active_params(hidden, self.is_sparse(number))
    }

    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let hidden = config.hidden_size;
        self.attention_elements(hidden, shard)
            + self.feed_forward.sizes.stored_params(hidden, self.is_sparse(number), shard)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        2.0 * (self.num_attention_heads * (self.query_dim() + self.v_head_dim)) as f64
    }

    fn attention_span(&self, _number: usize) -> AttentionSpan {
        AttentionSpan::All
    }

    fn parallel_sizes(&self) -> Vec<Divisible> {
        let heads = Divisible::new("num_attention_heads", self.num_attention_heads);
        [vec![heads], self.feed_forward.sizes.parallel_sizes()].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        let heads = self.num_attention_heads * 3 * (self.query_dim() + self.v_head_dim);
        let attention = (4 * config.hidden_size + heads) as f64;
        attention.max(self.feed_forward.sizes.widest(config.hidden_size))
    }
}

/// One layer: norm, latent attention, norm, MLP, each pair added to the residual stream.
#[derive(Debug)]
struct DeepseekV3Layer {
    input_norm: RmsNorm,
    attention: LatentAttention,
    post_attention_norm: RmsNorm,
    mlp: FeedForward,
}

impl DeepseekV3Layer {
    fn new(
        target: &TargetConfig,
        config: &DeepseekV3Config,
        number: usize,
        init: &Init,
    ) -> Result<Self> {
        let module = init.path(&format!("layers.{number}"));
        let within = |part: &str| format!("{module}.{part}");
        let hidden = target.hidden_size;
        let norm = |part: &str| init.rms_norm(&within(&format!("{part}.weight")), hidden, target);
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: LatentAttention::new(target, config, number, &within("self_attn"), init)?,
            post_attention_norm: norm("post_attention_layernorm")?,
            mlp: config.feed_forward.read(
                init,
                &within("mlp"),
                hidden,
                config.is_sparse(number),
            )?,
        })
    }
}

impl Layer for DeepseekV3Layer {
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let x_th = self.attention.add_to(x_th, &self.input_norm.of(x_th), pass);
        let normed = self.post_attention_norm.of(&x_th);
        self.mlp.add_onto(x_th, &normed)
    }

    fn memory(&self) -> Memory {
        let attention = &self.attention;
        let key_dim = attention.latent_norm.weight.size()[0] + attention.rotated;
        Memory::Latent { key_dim, value_dim: key_dim - attention.rotated }
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        self.input_norm.kernels = kernels;
        self.attention.set_kernels(kernels);
        self.post_attention_norm.kernels = kernels;
        self.mlp.set_kernels(kernels);
    }
}

#[derive(Debug)]
struct LatentAttention {
    layer: usize,
    queries: Queries,
    /// Projects to the latent and the rotated key, preceded by the query latent, if any.
    down: Linear,
    latent_norm: RmsNorm,
    up: LatentUp,
    output: Linear,
    /// Rotated elements per head.
    rotated: i64,
    query_dim: i64,
    scale: f64,
    kernels: Kernels,
}

#[derive(Debug)]
enum Queries {
    Direct(Linear),
    /// Through a normalised latent.
    Latent {
        norm: RmsNorm,
        up: Linear,
    },
}

impl LatentAttention {
    fn new(
        target: &TargetConfig,
        config: &DeepseekV3Config,
        layer: usize,
        module: &str,
        init: &Init,
    ) -> Result<Self> {
        let (hidden, heads) = (target.hidden_size, config.num_attention_heads);
        let (key, value) = (config.qk_nope_head_dim, config.v_head_dim);
        let linear = |name, parts: &[(&str, Outputs)], input, bias, split| {
            init.linear(&LinearSpec { module, name, parts, input, bias, split })
        };
        let norm = |name: &str, size: i64| -> Result<RmsNorm> {
            let weight = init.norm(&format!("{module}.{name}.weight"), size)?;
            Ok(RmsNorm { weight, eps: LATENT_EPS, kernels: Kernels::Fast })
        };
        let (bias, query) = (config.attention_bias, Outputs::Even(heads * config.query_dim()));
        let kept = ("kv_a_proj_with_mqa", Outputs::Even(config.kept()));
        let (queries, down) = match config.q_lora_rank {
            None => {
                let direct = linear("q_proj", &[("q_proj", query)], hidden, false, Split::Outputs)?;
                (Queries::Direct(direct), linear("kv_a_proj", &[kept], hidden, bias, Split::Whole)?)
            }
            Some(rank) => {
                let norm = norm("q_a_layernorm", rank)?;
                let up = linear("q_b_proj", &[("q_b_proj", query)], rank, false, Split::Outputs)?;
                let parts = [("q_a_proj", Outputs::Even(rank)), kept];
                let down = linear("q_kv_a_proj", &parts, hidden, bias, Split::Whole)?;
                (Queries::Latent { norm, up }, down)
            }
        };
        let up = [("kv_b_proj", Outputs::Even(heads * (key + value)))];
        let up = linear("kv_b_proj", &up, config.kv_lora_rank, false, Split::Outputs)?;
        let output = [("o_proj", Outputs::Even(hidden))];
        Ok(Self {
            layer,
            queries,
            down,
            latent_norm: norm("kv_a_layernorm", config.kv_lora_rank)?,
            up: LatentUp::new(&up.weight_io(), init.share(heads), key),
            output: linear("o_proj", &output, heads * value, bias, Split::Inputs)?,
            rotated: config.qk_rope_head_dim,
            query_dim: config.query_dim(),
            scale: config.score_factor / (config.query_dim() as f64).sqrt(),
            kernels: Kernels::Fast,
        })
    }

    /// `residual_th` plus the attention output for `x_th`.
    fn add_to(&self, residual_th: &Tensor, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let down = self.down.apply(x_th);
        let width = down.size()[1];
        let latent = self.latent_norm.weight.size()[0];
        let own = width - latent - self.rotated;
        let q = match &self.queries {
            Queries::Direct(linear) => linear.apply(x_th),
            Queries::Latent { norm, up } => {
                up.apply(&norm.of(&down.narrow(1, 0, own).contiguous()))
            }
        };
        let q_tnd = q.unflatten(1, [-1, self.query_dim]);
        let plain = self.query_dim - self.rotated;
        let rotate = |x: &Tensor| pass.tables[0].rotate(x);
        let q_rotated = rotate(&q_tnd.narrow(2, plain, self.rotated));
        let latent_tl = self.latent_norm.of(&down.narrow(1, own, latent).contiguous());
        let k_rotated = rotate(&down.narrow(1, own + latent, self.rotated).unsqueeze(1));
        let asked = Latent {
            q_tnd: Tensor::cat(&[q_tnd.narrow(2, 0, plain), q_rotated], 2),
            kept_t1c: Tensor::cat(&[latent_tl.unsqueeze(1), k_rotated], 2),
            up: &self.up,
            kernels: self.kernels,
        };
        let scores = Scores { scale: Some(self.scale), ..Scores::default() };
        let place =
            AttentionPlace { layer: self.layer, attention_span: AttentionSpan::All, scores };
        self.output.add_to(residual_th, &pass.attend.attend_latent(place, &asked))
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        self.kernels = kernels;
        self.latent_norm.kernels = kernels;
        if let Queries::Latent { norm, .. } = &mut self.queries {
            norm.kernels = kernels;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The relevant numbers of DeepSeek-V3's config.json, with `changes`.
    fn read(changes: &[(&str, Value)]) -> Result<DeepseekV3Config> {
        let mut config = json!({
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
            "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": true,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
            "max_position_embeddings": 163_840, "rope_theta": 10000,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                             "type": "yarn"},
        });
        changes.iter().for_each(|(key, value)| config[key] = value.clone());
        let path = std::path::Path::new("config.json");
        DeepseekV3Config::read(&Fields::parse(path, &config.to_string()).unwrap())
    }

    #[test]
    fn the_released_config_is_read() {
        let config = read(&[]).unwrap();
        // 0.1 ln(40) + 1, squared.
        assert!((config.score_factor - 1.873_854_2).abs() < 1e-6, "{}", config.score_factor);
        let groups = |config: &DeepseekV3Config| config.feed_forward.routing.unwrap().groups;
        assert_eq!(groups(&config), Some(ExpertGroups { count: 8, kept: 4 }));
        assert_eq!(config.rope.pairs, Pairs::Neighbours);
        assert_eq!([2, 3].map(|layer| config.is_sparse(layer)), [false, true]);
        assert_eq!(read(&[("rope_scaling", Value::Null)]).unwrap().score_factor, 1.0);
        // Kimi K2 has one group.
        let kimi = read(&[("n_group", json!(1)), ("topk_group", json!(1))]).unwrap();
        assert_eq!(groups(&kimi), None);
    }

    #[test]
    fn what_is_another_models_is_refused_by_key() {
        for (key, value) in [
            ("topk_method", json!("group_limited_greedy")),
            ("scoring_func", json!("softmax")),
            ("moe_layer_freq", json!(2)),
            ("num_key_value_heads", json!(8)),
            ("n_group", json!(7)),
            ("kv_lora_rank", Value::Null),
        ] {
            let message = read(&[(key, value)]).unwrap_err().to_string();
            assert!(message.contains(&format!("`{key}`")), "{message}");
        }
    }
}
