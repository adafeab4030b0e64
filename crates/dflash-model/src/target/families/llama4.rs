//! Llama 4: chunked attention with RoPE of neighbours in most layers, all of the context without RoPE in
//! the others, and one expert of a token, which scales its input, beside a shared one.

use tch::Device;

use super::{Architecture, MixtureSizes, experts_count, layer_types};
use crate::Result;
use crate::fields::Fields;
use crate::ops::{Pairs, Rotary};
use crate::target::TargetConfig;
use crate::target::blocks::attention::{
    AttentionSpec, HeadNorms, Heads, SelfAttention, Temperature,
};
use crate::target::blocks::experts::{
    ExpertsSpec, Gated, RouterSpec, Routing, Scores, Stored, Weighed,
};
use crate::target::blocks::feed_forward::{
    FeedForward, Mixture, Mlp, MlpSpec, SharedExpert, activation,
};
use crate::target::blocks::pre_norm::PreNormLayer;
use crate::target::blocks::rope::{Rope, RopeKeys, rope_parameters};
use crate::target::divided::{Divisible, Shard};
use crate::target::layer::{Layer, Reach};
use crate::target::parameters::Init;

/// Its dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama4Config {
    heads: Heads,
    attention_bias: bool,
    use_qk_norm: bool,
    rope: Rope,
    /// By layer: whether it rotates queries and keys.
    rotates: Vec<bool>,
    reaches: Vec<Reach>,
    /// Of the layers without RoPE.
    temperature: Option<Temperature>,
    sizes: MixtureSizes,
    gated: Gated,
    /// By layer: whether it has experts.
    sparse: Vec<bool>,
}

/// What its class fills in.
const CHUNK: i64 = 8192;
const THETA: f64 = 500_000.0;
const ROPELESS_INTERVAL: i64 = 4;

impl Llama4Config {
    pub(crate) fn read(text: &Fields) -> Result<Self> {
        let layers = text.required("num_hidden_layers", Fields::size)? as usize;
        let heads = Heads::read(text, None)?;
        let rope = Rope::read(RopeKeys {
            text,
            parameters: rope_parameters(text)?,
            head_dim: heads.dim,
            theta: THETA,
            partial: 1.0,
            pairs: Pairs::Neighbours,
        })?;
        let rotates = rotates(text, layers)?;
        let chunk = text.size("attention_chunk_size")?.unwrap_or(CHUNK);
        let reach = |kind: &str| match kind {
            "chunked_attention" => Some(Reach::Chunk(chunk)),
            "full_attention" => Some(Reach::All),
            _ => None,
        };
        let by_rope = |&rotates: &bool| if rotates { Reach::Chunk(chunk) } else { Reach::All };
        let inner = text.required("intermediate_size", Fields::size)?;
        Ok(Self {
            heads,
            attention_bias: text.flag("attention_bias")?,
            use_qk_norm: text.value("use_qk_norm").is_none() || text.flag("use_qk_norm")?,
            rope,
            reaches: layer_types(text, layers, reach)?
                .unwrap_or_else(|| rotates.iter().map(by_rope).collect()),
            rotates,
            temperature: temperature(text)?,
            sizes: MixtureSizes {
                experts: experts_count(text, &["num_local_experts"])?,
                chosen: text.size("num_experts_per_tok")?.unwrap_or(1),
                inner,
                shared: inner,
                dense: text.required("intermediate_size_mlp", Fields::size)?,
            },
            gated: activation(text, "hidden_act", "silu")?,
            sparse: sparse(text, layers)?,
        })
    }

    fn feed_forward(
        &self,
        config: &TargetConfig,
        module: &str,
        number: usize,
        init: &Init,
    ) -> Result<FeedForward> {
        let (hidden, gated) = (config.hidden_size, self.gated);
        let mlp = |module: &str, inner| {
            Mlp::new(init, &MlpSpec { module, hidden, inner, fused: false, gated })
        };
        if !self.sparse[number] {
            return Ok(FeedForward::Dense(mlp(module, self.sizes.dense)?));
        }
        let router = RouterSpec {
            weight: &format!("{module}.router.weight"),
            bias: None,
            correction: None,
            expert_scale: None,
            experts: self.sizes.experts,
            hidden,
            routing: Routing {
                chosen: self.sizes.chosen,
                scores: Scores::Sigmoid,
                normalised: false,
                scale: 1.0,
                groups: None,
            },
        };
        let experts = ExpertsSpec {
            module: &format!("{module}.experts"),
            names: ["gate_proj", "up_proj", "down_proj"],
            stored: Stored::InputsFirst,
            experts: self.sizes.experts,
            hidden,
            inner: self.sizes.inner,
            bias: false,
            gated,
            weighed: Weighed::Inputs,
        };
        let shared = mlp(&format!("{module}.shared_expert"), self.sizes.shared)?;
        let shared = SharedExpert { mlp: shared, gate_1h: None };
        Ok(FeedForward::Mixture(Mixture::new(init, &router, &experts, Some(shared))?))
    }
}

/// By `no_rope_layers`, where 1 says that a layer *has* RoPE, or by their interval.
fn rotates(text: &Fields, layers: usize) -> Result<Vec<bool>> {
    let listed = text.tokens("no_rope_layers")?;
    if !listed.is_empty() {
        if listed.len() < layers {
            return Err(text.refuse("no_rope_layers", "one entry per layer is needed"));
        }
        return Ok(listed[..layers].iter().map(|&rotates| rotates != 0).collect());
    }
    let interval = text.size("no_rope_layer_interval")?.unwrap_or(ROPELESS_INTERVAL) as usize;
    Ok((0..layers).map(|layer| (layer + 1) % interval != 0).collect())
}

/// Layers with experts, by `moe_layers` or by their step.
fn sparse(text: &Fields, layers: usize) -> Result<Vec<bool>> {
    if text.value("moe_layers").is_some() {
        let listed = text.tokens("moe_layers")?;
        return Ok((0..layers as i64).map(|layer| listed.contains(&layer)).collect());
    }
    let step = text.size("interleave_moe_layer_step")?.unwrap_or(1) as usize;
    Ok((0..layers).map(|layer| (layer + 1) % step == 0).collect())
}

fn temperature(text: &Fields) -> Result<Option<Temperature>> {
    // Released configs have a number here, of which any but 0 says yes.
    let yes = |value: &serde_json::Value| value.as_bool().or(value.as_f64().map(|it| it != 0.0));
    let tuned = text.typed("attn_temperature_tuning", "true or false is needed", yes)?;
    let scale = text.number("attn_scale")?.unwrap_or(0.1);
    let floor = text.number("floor_scale")?.unwrap_or(8192.0);
    Ok(tuned.unwrap_or(true).then_some(Temperature { scale, floor }))
}

impl Architecture for Llama4Config {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let module = init.path(&format!("layers.{number}"));
        let (hidden, rotates) = (config.hidden_size, self.rotates[number]);
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        Ok(Box::new(PreNormLayer {
            input_layernorm: norm("input_layernorm")?,
            self_attn: SelfAttention::new(
                init,
                AttentionSpec {
                    module: &format!("{module}.self_attn"),
                    layer: number,
                    hidden,
                    heads: self.heads,
                    reach: self.reaches[number],
                    rotary: rotates.then_some(0),
                    norms: match self.use_qk_norm && rotates {
                        true => HeadNorms::Plain { eps: config.rms_norm_eps },
                        false => HeadNorms::None,
                    },
                    bias: (self.attention_bias, self.attention_bias),
                    fused: false,
                    scale: None,
                    softcap: None,
                    sinks: false,
                    temperature: self.temperature.filter(|_| !rotates),
                },
            )?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: self.feed_forward(config, &format!("{module}.feed_forward"), number, init)?,
        }))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        let hidden = config.hidden_size;
        self.heads.elements(hidden) + self.sizes.met(hidden, self.sparse[number])
    }

    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let hidden = config.hidden_size;
        let attention = self.heads.own(shard).elements(hidden);
        attention + self.sizes.stored(hidden, self.sparse[number], shard)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        self.heads.pair_flops()
    }

    fn reach(&self, number: usize) -> Reach {
        self.reaches[number]
    }

    fn divided(&self) -> Vec<Divisible> {
        [self.heads.divided(), self.sizes.divided()].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        self.heads.widest(config.hidden_size).max(self.sizes.widest(config.hidden_size))
    }
}
