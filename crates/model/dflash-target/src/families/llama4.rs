//! Llama 4: chunked attention with interleaved RoPE in most layers, full attention without RoPE in
//! the others, and one routed expert per token, which scales its input, plus a shared expert.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::ops::Pairs;
use dflash_tensor::rope::{Rope, RopeKeys};

use super::{Family, Known, experts_count, layer_types};
use crate::Outer;
use crate::blocks::attention::{Heads, Temperature};
use crate::blocks::experts::{Routing, Scores, Stored, Weighed};
use crate::blocks::feed_forward::{FeedForwardSpec, MixtureSizes, MixtureStorage, activation};
use crate::blocks::pre_norm::{NormsOfHeads, PreNormFamily};
use crate::facts::HeadFacts;

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
    model_types: &["llama4_text", "llama4"],
    head: HeadFacts::rms(1e-5),
    read,
}];

/// Class defaults.
const CHUNK: i64 = 8192;
const THETA: f64 = 500_000.0;
const ROPELESS_INTERVAL: i64 = 4;

fn read(text: &Fields) -> Result<(Family, Outer)> {
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    let heads = Heads::read(text, None)?;
    let keys = RopeKeys::of(text, heads.dim)?;
    let rope = Rope::read(RopeKeys { theta: THETA, pairs: Pairs::Neighbours, ..keys })?;
    let rotates = rotates(text, layers)?;
    let bias = text.flag("attention_bias")?;
    let has_norms = text.flag_or("use_qk_norm", true)?;
    let mut family = PreNormFamily {
        bias: (bias, bias),
        norms: if has_norms { NormsOfHeads::Plain } else { NormsOfHeads::None },
        temperature: temperature(text)?,
        module: "feed_forward",
        ..PreNormFamily::new(layers, heads, rope, feed_forward(text)?)
    }
    .with_attention_spans(attention_spans(text, &rotates)?)
    .with_experts(sparse(text, layers)?);
    family.layers.iter_mut().zip(rotates).for_each(|(layer, rotates)| layer.rotates = rotates);
    Ok((family.into(), Outer::PLAIN))
}

fn feed_forward(text: &Fields) -> Result<FeedForwardSpec> {
    let inner = text.required("intermediate_size", Fields::size)?;
    let top_k = text.size("num_experts_per_tok")?.unwrap_or(1);
    Ok(FeedForwardSpec {
        sizes: MixtureSizes {
            experts: experts_count(text, &["num_local_experts"])?,
            top_k,
            inner,
            shared: inner,
            dense: text.required("intermediate_size_mlp", Fields::size)?,
        },
        fused: false,
        gated: activation(text, "hidden_act", "silu")?,
        routing: Some(Routing {
            top_k,
            scores: Scores::Sigmoid,
            normalised: false,
            scale: 1.0,
            groups: None,
        }),
        stored: MixtureStorage {
            router: "router.weight",
            layout: Stored::InputsFirst,
            weighed: Weighed::Inputs,
            ..MixtureStorage::USUAL
        },
    })
}

fn attention_spans(text: &Fields, rotates: &[bool]) -> Result<Vec<AttentionSpan>> {
    let chunk = text.size("attention_chunk_size")?.unwrap_or(CHUNK);
    let attention_span = |kind: &str| match kind {
        "chunked_attention" => Some(AttentionSpan::Chunk(chunk)),
        "full_attention" => Some(AttentionSpan::All),
        _ => None,
    };
    let by_rope =
        |&rotates: &bool| if rotates { AttentionSpan::Chunk(chunk) } else { AttentionSpan::All };
    let named = layer_types(text, rotates.len(), attention_span)?;
    Ok(named.unwrap_or_else(|| rotates.iter().map(by_rope).collect()))
}

/// From `no_rope_layers`, where 1 means that a layer *has* RoPE, or from the interval.
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

/// Which layers have experts, from `moe_layers` or the interval.
fn sparse(text: &Fields, layers: usize) -> Result<Vec<bool>> {
    if text.value("moe_layers").is_some() {
        let listed = text.tokens("moe_layers")?;
        return Ok((0..layers as i64).map(|layer| listed.contains(&layer)).collect());
    }
    let step = text.size("interleave_moe_layer_step")?.unwrap_or(1) as usize;
    Ok((0..layers).map(|layer| (layer + 1) % step == 0).collect())
}

fn temperature(text: &Fields) -> Result<Option<Temperature>> {
    // Released configs have a number here; nonzero means true.
    let yes = |value: &serde_json::Value| value.as_bool().or(value.as_f64().map(|it| it != 0.0));
    let tuned = text.typed("attn_temperature_tuning", "true or false is needed", yes)?;
    let scale = text.number("attn_scale")?.unwrap_or(0.1);
    let floor = text.number("floor_scale")?.unwrap_or(8192.0);
    Ok(tuned.unwrap_or(true).then_some(Temperature { scale, floor }))
}
