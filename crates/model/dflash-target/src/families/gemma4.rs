//! Gemma 4: Gemma 3's norms around each half of a layer, but with plain weights; no attention
//! scale; different heads and proportional RoPE in full layers. Small models add per-layer inputs
//! and share keys and values in their last layers; large ones use keys as values in full layers;
//! experts run in parallel to the MLP.

mod per_layer;

use dflash_formats::fields::Fields;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::Result;
use dflash_tensor::attention_span::{AttentionPlace, AttentionSpan};
use dflash_tensor::ops::{Pairs, Rotary, Scores as Scored};
use dflash_tensor::rope::{Rope, RopeKeys, Scaling};
use tch::{Device, Kind, Tensor};

use self::per_layer::{PerLayerInput, PerLayerInputs};
use super::{Architecture, Family, Known, Prepare, experts_count, layer_types, top_k_count};
use crate::TargetConfig;
use crate::blocks::attention::{Heads, plain_norm};
use crate::blocks::experts::{
    Experts, ExpertsSpec, Gated, Router, RouterSpec, Routing, Scores, Stored, Weighed,
};
use crate::blocks::feed_forward::{MixtureSizes, Mlp, MlpSpec, activation, mlp_elements};
use crate::config::Outer;
use crate::facts::{HeadFacts, NormKind};
use crate::layer::{Layer, Memory, Pass, Projected, RmsNorm};
use crate::parallel::{Divisible, Shard};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    model_types: &["gemma4_text", "gemma4"],
    head: HeadFacts::gemma(NormKind::Rms, None),
    read: Gemma4Config::read,
}];

/// Dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
struct Gemma4Config {
    /// Per layer.
    heads: Vec<Heads>,
    attention_spans: Vec<AttentionSpan>,
    intermediate_size: i64,
    gated: Gated,
    attention_bias: bool,
    /// Whether full layers use their keys as values.
    attention_k_eq_v: bool,
    /// The first layer without its own keys.
    first_shared: usize,
    use_double_wide_mlp: bool,
    /// For full and for sliding layers.
    ropes: [Rope; 2],
    per_layer: Option<PerLayer>,
    experts: Option<MixtureSizes>,
}

/// Per-layer inputs in addition to the residual stream.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PerLayer {
    size: i64,
    vocab_size: i64,
}

/// Class defaults.
const HEADS: Heads = Heads { query: 8, key: 4, dim: 256 };
const GLOBAL_HEAD_DIM: i64 = 512;
const VOCAB_SIZE: i64 = 262_144;
const WINDOW: i64 = 512;
const PATTERN: usize = 6;
const PER_LAYER_SIZE: i64 = 256;

impl Gemma4Config {
    fn read(text: &Fields) -> Result<(Family, Outer)> {
        let layers = text.required("num_hidden_layers", Fields::size)? as usize;
        if text.text("use_bidirectional_attention")?.as_deref() == Some("all") {
            return Err(text.refuse("use_bidirectional_attention", "only causal text is supported"));
        }
        let attention_spans = attention_spans(text, layers)?;
        let heads = heads(text, &attention_spans)?;
        let shared = text.token("num_kv_shared_layers")?.unwrap_or(0) as usize;
        if shared >= layers {
            return Err(
                text.refuse("num_kv_shared_layers", "fewer than num_hidden_layers are needed")
            );
        }
        let first_shared = layers - shared;
        let made = |layer: usize| attention_spans[..first_shared].contains(&attention_spans[layer]);
        if !(first_shared..layers).all(made) {
            return Err(
                text.refuse("num_kv_shared_layers", "a layer has none of its kind before it")
            );
        }
        let of = |full: bool| {
            let is_it = |layer: &usize| (attention_spans[*layer] == AttentionSpan::All) == full;
            (0..layers).find(is_it).map_or(HEADS.dim, |layer| heads[layer].dim)
        };
        let config = Self {
            ropes: [
                rope(text, "full_attention", of(true))?,
                rope(text, "sliding_attention", of(false))?,
            ],
            heads,
            intermediate_size: text.required("intermediate_size", Fields::size)?,
            gated: activation(text, "hidden_activation", "gelu_pytorch_tanh")?,
            attention_bias: text.flag("attention_bias")?,
            attention_k_eq_v: text.flag("attention_k_eq_v")?,
            first_shared,
            use_double_wide_mlp: text.flag("use_double_wide_mlp")?,
            per_layer: per_layer(text)?,
            experts: experts(text)?,
            attention_spans,
        };
        let hidden = text.required("hidden_size", Fields::size)?;
        let outer = Outer {
            embedding_scale: (hidden as f64).sqrt(),
            norm_plus_one: false,
            final_softcap: text.number("final_logit_softcapping")?,
        };
        Ok((config.into(), outer))
    }

    fn is_full(&self, layer: usize) -> bool {
        self.attention_spans[layer] == AttentionSpan::All
    }

    /// The layer whose keys and values layer `number` uses.
    fn source(&self, number: usize) -> usize {
        if number < self.first_shared {
            return number;
        }
        let same = |&layer: &usize| self.attention_spans[layer] == self.attention_spans[number];
        (0..self.first_shared).rfind(same).expect("checked when it was read")
    }

    /// Width of the MLP of layer `number`.
    fn inner(&self, number: usize) -> i64 {
        let wide = self.use_double_wide_mlp && number >= self.first_shared;
        self.intermediate_size * if wide { 2 } else { 1 }
    }

    /// Whether layer `number` uses its keys as values.
    fn has_keys_as_values(&self, number: usize) -> bool {
        self.attention_k_eq_v && self.is_full(number)
    }

    /// Matrix elements of a rank's layer `number`, without experts.
    fn elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let (hidden, heads) = (config.hidden_size, self.heads[number].own(shard));
        let keys_and_values = match number < self.first_shared {
            true if self.has_keys_as_values(number) => heads.key_size(),
            true => 2 * heads.key_size(),
            false => 0,
        };
        let attention = hidden * (2 * heads.query_size() + keys_and_values);
        let per_layer = self.per_layer.map_or(0, |per_layer| 2 * hidden * per_layer.size);
        let mlp = mlp_elements(hidden, shard.share(self.inner(number)));
        (attention + per_layer) as f64 + mlp
    }
}

/// Layer types; the last layer is always full, as in Transformers.
fn attention_spans(text: &Fields, layers: usize) -> Result<Vec<AttentionSpan>> {
    let window = text.size("sliding_window")?.unwrap_or(WINDOW);
    let attention_span = |kind: &str| match kind {
        "sliding_attention" => Some(AttentionSpan::Window(window)),
        "full_attention" => Some(AttentionSpan::All),
        _ => None,
    };
    let by_pattern = |layer: usize| match (layer + 1) % PATTERN {
        0 => AttentionSpan::All,
        _ => AttentionSpan::Window(window),
    };
    let mut attention_spans = layer_types(text, layers, attention_span)?
        .unwrap_or_else(|| (0..layers).map(by_pattern).collect());
    if let Some(last) = attention_spans.last_mut() {
        *last = AttentionSpan::All;
    }
    Ok(attention_spans)
}

/// Heads per layer; those of full layers from `per_layer_config` (Transformers since 5.17) or from
/// `global_head_dim` and `num_global_key_value_heads` (as released).
fn heads(text: &Fields, attention_spans: &[AttentionSpan]) -> Result<Vec<Heads>> {
    let plain = Heads::read(text, Some(HEADS))?;
    let mut heads = vec![plain; attention_spans.len()];
    if let Some(by_layer) = text.object("per_layer_config")? {
        for (layer, heads) in heads.iter_mut().enumerate() {
            let Some(own) = by_layer.object(&layer.to_string())? else { continue };
            heads.dim = own.size("head_dim")?.unwrap_or(plain.dim);
            heads.key = own.size("num_key_value_heads")?.unwrap_or(plain.key);
        }
        return Ok(heads);
    }
    let dim = text.size("global_head_dim")?.unwrap_or(GLOBAL_HEAD_DIM);
    let gated = text.flag("attention_k_eq_v")?;
    let key = text.size("num_global_key_value_heads")?.filter(|_| gated).unwrap_or(plain.key);
    for (heads, attention_span) in heads.iter_mut().zip(attention_spans) {
        if *attention_span == AttentionSpan::All {
            (heads.dim, heads.key) = (dim, key);
        }
    }
    Ok(heads)
}

fn rope(text: &Fields, kind: &str, head_dim: i64) -> Result<Rope> {
    let parameters = match text.object("rope_parameters")? {
        Some(by_kind) => by_kind.object(kind)?,
        None => None,
    };
    let is_full = kind == "full_attention";
    let (theta, pairs) = (if is_full { 1_000_000.0 } else { 10_000.0 }, Pairs::Halves);
    if parameters.is_none() && is_full {
        let scaling = Scaling::Proportional { turning: 0.25, factor: 1.0 };
        return Ok(Rope { scaling, ..Rope::plain(theta, head_dim) });
    }
    Rope::read(RopeKeys { text, parameters, head_dim, theta, partial: 1.0, pairs })
}

fn per_layer(text: &Fields) -> Result<Option<PerLayer>> {
    let size = text.token("hidden_size_per_layer_input")?.unwrap_or(PER_LAYER_SIZE);
    let vocab_size = text.size("vocab_size_per_layer_input")?.unwrap_or(VOCAB_SIZE);
    let rows = text.size("vocab_size")?.unwrap_or(VOCAB_SIZE);
    if size > 0 && vocab_size < rows {
        return Err(
            text.refuse("vocab_size_per_layer_input", "no fewer than vocab_size are needed")
        );
    }
    Ok((size > 0).then_some(PerLayer { size, vocab_size }))
}

fn experts(text: &Fields) -> Result<Option<MixtureSizes>> {
    if !text.flag("enable_moe_block")? {
        return Ok(None);
    }
    let experts = experts_count(text, &["num_experts"])?;
    Ok(Some(MixtureSizes {
        experts,
        top_k: top_k_count(text, &["top_k_experts"], experts)?,
        inner: text.required("moe_intermediate_size", Fields::size)?,
        shared: 0,
        dense: 0,
    }))
}

impl Architecture for Gemma4Config {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let module = init.path(&format!("layers.{number}"));
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        Ok(Box::new(Gemma4Layer {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Gemma4Attention::new(config, self, number, init)?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm")?,
            mlp: Mlp::new(
                init,
                &MlpSpec {
                    module: &format!("{module}.mlp"),
                    hidden,
                    inner: self.inner(number),
                    fused: false,
                    gated: self.gated,
                },
            )?,
            experts: match &self.experts {
                Some(sizes) => Some(MoeBlock::new(config, sizes, self.gated, &module, init)?),
                None => None,
            },
            post_feedforward_layernorm: norm("post_feedforward_layernorm")?,
            per_layer_input: match self.per_layer {
                Some(per_layer) => Some(PerLayerInput::new(
                    config,
                    per_layer.size,
                    self.gated,
                    number,
                    &module,
                    init,
                )?),
                None => None,
            },
            layer_scalar: init.matrix(&format!("{module}.layer_scalar"), &[1])?,
        }))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        self.ropes.iter().map(|rope| rope.rotary(device)).collect()
    }

    fn prepare(&self, config: &TargetConfig, init: &Init) -> Result<Option<Box<dyn Prepare>>> {
        let Some(per_layer) = self.per_layer else { return Ok(None) };
        Ok(Some(Box::new(PerLayerInputs::new(config, per_layer, init)?)))
    }

    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        let experts =
            self.experts.map_or(0.0, |sizes| sizes.active_params(config.hidden_size, true));
        self.elements(config, number, &Shard::WHOLE) + experts
    }

    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let hidden = config.hidden_size;
        let experts = self.experts.map_or(0.0, |sizes| sizes.stored_params(hidden, true, shard));
        self.elements(config, number, shard) + experts
    }

    fn vocab_size(&self) -> Option<i64> {
        Some(VOCAB_SIZE)
    }

    // Released configs omit class defaults.
    fn is_tied(&self) -> bool {
        true
    }

    fn prepared_names(&self) -> &'static [&'static str] {
        PerLayerInputs::NAMES
    }

    fn prepared_elements(&self, config: &TargetConfig) -> f64 {
        let of = |PerLayer { size, vocab_size }| {
            let all = size * config.num_hidden_layers as i64;
            ((vocab_size + config.hidden_size) * all) as f64
        };
        self.per_layer.map_or(0.0, of)
    }

    fn pair_flops(&self, number: usize) -> f64 {
        self.heads[number].pair_flops()
    }

    fn attention_span(&self, number: usize) -> AttentionSpan {
        self.attention_spans[number]
    }

    fn parallel_sizes(&self) -> Vec<Divisible> {
        let heads = self.heads.iter().flat_map(|heads| heads.parallel_sizes());
        let inner = Divisible::new("intermediate_size", self.intermediate_size);
        let experts = self.experts.map(MixtureSizes::parallel_sizes).unwrap_or_default();
        heads.chain([inner]).chain(experts).collect()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        let hidden = config.hidden_size;
        let of = |number: usize| {
            let mlp = (4 * hidden + 3 * self.inner(number)) as f64;
            let experts = self.experts.map_or(0.0, |sizes| sizes.widest(hidden));
            self.heads[number].widest(hidden).max(mlp + experts)
        };
        (0..self.heads.len()).map(of).fold(0.0, f64::max)
    }
}

/// Field names are the checkpoint's.
#[derive(Debug)]
struct Gemma4Layer {
    input_layernorm: RmsNorm,
    self_attn: Gemma4Attention,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: Mlp,
    experts: Option<MoeBlock>,
    post_feedforward_layernorm: RmsNorm,
    per_layer_input: Option<PerLayerInput>,
    layer_scalar: Tensor,
}

impl Layer for Gemma4Layer {
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let attended = self.self_attn.forward(&self.input_layernorm.of(x_th), pass);
        let x_th = x_th + self.post_attention_layernorm.of(&attended);
        let mut made = self.mlp.forward(&self.pre_feedforward_layernorm.of(&x_th));
        if let Some(experts) = &self.experts {
            made = experts.beside(&made, &x_th);
        }
        let mut x_th = x_th + self.post_feedforward_layernorm.of(&made);
        if let Some(input) = &self.per_layer_input {
            x_th = input.add_to(&x_th, pass);
        }
        x_th * &self.layer_scalar
    }

    fn memory(&self) -> Memory {
        self.self_attn.memory()
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        for norm in [
            &mut self.input_layernorm,
            &mut self.post_attention_layernorm,
            &mut self.pre_feedforward_layernorm,
            &mut self.post_feedforward_layernorm,
        ] {
            norm.kernels = kernels;
        }
        self.self_attn.set_kernels(kernels);
        self.mlp.set_kernels(kernels);
        if let Some(experts) = &mut self.experts {
            experts.set_kernels(kernels);
        }
        if let Some(input) = &mut self.per_layer_input {
            input.post_per_layer_input_norm.kernels = kernels;
        }
    }
}

/// Attention with its own keys or those of an earlier layer.
#[derive(Debug)]
struct Gemma4Attention {
    number: usize,
    source: usize,
    heads: Heads,
    attention_span: AttentionSpan,
    /// Index of the pass's rotary tables.
    tables: usize,
    eps: f64,
    q_proj: Linear,
    q_norm: RmsNorm,
    own: Option<KeyValue>,
    o_proj: Linear,
    kernels: Kernels,
}

/// Key and value projections; without a value projection, values are the keys before their norm.
#[derive(Debug)]
struct KeyValue {
    k_proj: Linear,
    k_norm: RmsNorm,
    v_proj: Option<Linear>,
}

impl Gemma4Attention {
    fn new(
        target: &TargetConfig,
        config: &Gemma4Config,
        number: usize,
        init: &Init,
    ) -> Result<Self> {
        let module = &init.path(&format!("layers.{number}.self_attn"));
        let (hidden, heads, bias) =
            (target.hidden_size, config.heads[number], config.attention_bias);
        let linear = |name: &str, input, output: Outputs, split| {
            init.linear(&LinearSpec { module, name, parts: &[(name, output)], input, bias, split })
        };
        let norm =
            |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), heads.dim, target);
        let k_eq_v = config.has_keys_as_values(number);
        let own = || -> Result<KeyValue> {
            let value = || linear("v_proj", hidden, heads.keys(), Split::Outputs);
            Ok(KeyValue {
                k_proj: linear("k_proj", hidden, heads.keys(), Split::Outputs)?,
                k_norm: norm("k_norm")?,
                v_proj: (!k_eq_v).then(value).transpose()?,
            })
        };
        Ok(Self {
            number,
            source: config.source(number),
            heads: heads.own(&init.shard),
            attention_span: config.attention_spans[number],
            tables: usize::from(!config.is_full(number)),
            eps: target.rms_norm_eps,
            q_proj: linear("q_proj", hidden, heads.queries(), Split::Outputs)?,
            q_norm: norm("q_norm")?,
            own: (number < config.first_shared).then(own).transpose()?,
            o_proj: linear("o_proj", heads.query_size(), Outputs::Even(hidden), Split::Inputs)?,
            kernels: Kernels::Fast,
        })
    }

    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let Heads { query, key, dim } = self.heads;
        let tables = &pass.tables[self.tables];
        let q_tnd = self.q_proj.apply(x_th).view([-1, query, dim]);
        let q_tnd = tables.rotate(&self.q_norm.of(&q_tnd));
        if let Some(KeyValue { k_proj, k_norm, v_proj }) = &self.own {
            let k_tmd = k_proj.apply(x_th).view([-1, key, dim]);
            let v_tmd = v_proj.as_ref().map(|v_proj| v_proj.apply(x_th).view([-1, key, dim]));
            let v_tmd = plain_norm(v_tmd.as_ref().unwrap_or(&k_tmd), self.eps);
            let k_tmd = tables.rotate(&k_norm.of(&k_tmd));
            pass.shared.insert(self.number, (k_tmd, v_tmd));
        }
        let (k_tmd, v_tme) = &pass.shared[&self.source];
        let (k_tmd, v_tme) = (k_tmd.shallow_clone(), v_tme.shallow_clone());
        let kernels = self.kernels;
        let projected = Projected { q_tnd, k_tmd, v_tme, kernels, are_kept: false };
        let scores = Scored { scale: Some(1.0), ..Scored::default() };
        let place =
            AttentionPlace { layer: self.source, attention_span: self.attention_span, scores };
        self.o_proj.apply(&pass.attend.attend(place, &projected))
    }

    fn memory(&self) -> Memory {
        let Heads { key, dim, .. } = self.heads;
        match self.own {
            Some(_) => Memory::Keys { heads: key, key_dim: dim, value_dim: dim },
            None => Memory::Nothing,
        }
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        self.kernels = kernels;
        self.q_norm.kernels = kernels;
        if let Some(own) = &mut self.own {
            own.k_norm.kernels = kernels;
        }
    }
}

/// Experts in parallel to the MLP, with separate norms. The router reads the residual stream.
#[derive(Debug)]
struct MoeBlock {
    router: Router,
    /// Factor `[H]` on the router's normed input, already divided by the root of H.
    router_scale_h: Tensor,
    eps: f64,
    experts: Experts,
    post_feedforward_layernorm_1: RmsNorm,
    pre_feedforward_layernorm_2: RmsNorm,
    post_feedforward_layernorm_2: RmsNorm,
}

impl MoeBlock {
    fn new(
        config: &TargetConfig,
        sizes: &MixtureSizes,
        gated: Gated,
        module: &str,
        init: &Init,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        let scale_h = init.float32(&format!("{module}.router.scale"), &[hidden])?;
        Ok(Self {
            router: Router::new(
                init,
                &RouterSpec {
                    weight: &format!("{module}.router.proj.weight"),
                    bias: None,
                    correction: None,
                    expert_scale: Some(&format!("{module}.router.per_expert_scale")),
                    experts: sizes.experts,
                    hidden,
                    routing: Routing {
                        top_k: sizes.top_k,
                        scores: Scores::Softmax,
                        normalised: true,
                        scale: 1.0,
                        groups: None,
                    },
                },
            )?,
            router_scale_h: scale_h * (hidden as f64).powf(-0.5),
            eps: config.rms_norm_eps,
            experts: Experts::new(
                init,
                &ExpertsSpec {
                    module: &format!("{module}.experts"),
                    names: ["gate_proj", "up_proj", "down_proj"],
                    stored: Stored::OutputsFirst,
                    experts: sizes.experts,
                    hidden,
                    inner: sizes.inner,
                    bias: false,
                    gated,
                    weighed: Weighed::Outputs,
                },
            )?,
            post_feedforward_layernorm_1: norm("post_feedforward_layernorm_1")?,
            pre_feedforward_layernorm_2: norm("pre_feedforward_layernorm_2")?,
            post_feedforward_layernorm_2: norm("post_feedforward_layernorm_2")?,
        })
    }

    /// Sum of the MLP's output `dense_th` and the experts' output for the residual stream `x_th`.
    fn beside(&self, dense_th: &Tensor, x_th: &Tensor) -> Tensor {
        let seen_th = plain_norm(&x_th.to_kind(Kind::Float), self.eps) * &self.router_scale_h;
        let routed = self.router.route(&seen_th);
        let made = self.experts.forward(&self.pre_feedforward_layernorm_2.of(x_th), &routed);
        self.post_feedforward_layernorm_1.of(dense_th) + self.post_feedforward_layernorm_2.of(&made)
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        for norm in [
            &mut self.post_feedforward_layernorm_1,
            &mut self.pre_feedforward_layernorm_2,
            &mut self.post_feedforward_layernorm_2,
        ] {
            norm.kernels = kernels;
        }
    }
}
