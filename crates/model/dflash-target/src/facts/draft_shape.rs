//! Draft defaults from the target's attention, MLP and rotary embedding.
//!
//! Drafts have Qwen3's layers: grouped heads of one size, a gated MLP, rotary embedding of whole
//! heads. Where the target differs, drafts follow published drafts: see docs/targets.md.

use dflash_formats::fields::Fields;
use dflash_formats::{RopeScaling, Wanted};
use dflash_tensor::Result;
use serde::Serialize;

use super::TargetSpec;

/// Heads and MLP of a draft. Field names are Hugging Face's.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DraftAttentionShape {
    pub num_attention_heads: i64,
    pub num_key_value_heads: i64,
    pub head_dim: i64,
    pub intermediate_size: i64,
}

/// A draft's shape unless it is set explicitly or taken from another draft.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DraftDefaults {
    /// Heads and MLP.
    pub heads: DraftAttentionShape,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// RoPE scaling, if the engines serve it identically.
    pub rope_scaling: Option<RopeScaling>,
    /// What was dropped from the target's rotary embedding, and why; one line each.
    pub notes: Vec<String>,
}

/// Key heads if the target compresses its keys; the number in published drafts.
const USUAL_KEY_HEADS: i64 = 8;
/// Maximum head size if the target has latent heads without an explicit size.
const USUAL_HEAD_DIM: i64 = 128;

/// Keys with the number of experts per layer.
const EXPERTS: [&str; 5] = [
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
];

pub(super) fn defaults(
    config: &Fields,
    text: &Fields,
    spec: &TargetSpec,
    hidden_size: i64,
) -> Result<DraftDefaults> {
    let mut notes = Vec::new();
    let rope = rope_parameters(text)?;
    let rope_theta = match spec.rope_theta {
        Some(theta) => theta,
        None => theta(config, text, rope.as_ref())?,
    };
    let rope_scaling = scaling(rope.as_ref(), &mut notes)?;
    partial_note(text, rope.as_ref(), &mut notes)?;
    let heads = heads(text, spec, hidden_size)?;
    Ok(DraftDefaults { heads, rope_theta, rope_scaling, notes })
}

fn heads(text: &Fields, spec: &TargetSpec, hidden_size: i64) -> Result<DraftAttentionShape> {
    let own = |own: Option<i64>, key: &str| match own {
        Some(value) => Ok(Some(value)),
        None => text.size(key),
    };
    let heads = match own(spec.num_attention_heads, "num_attention_heads")? {
        Some(heads) => heads,
        None => text.required("num_attention_heads", Fields::size)?,
    };
    let head_dim = own(spec.head_dim, "head_dim")?;
    // Compressed keys, or one key head for all: there are no grouped heads to copy.
    let latent = text.value("kv_lora_rank").is_some() || text.value("o_lora_rank").is_some();
    let (head_dim, key_heads) = if latent {
        let width = text.size("v_head_dim")?.or(head_dim.map(|dim| dim.min(USUAL_HEAD_DIM)));
        (width.unwrap_or(USUAL_HEAD_DIM), spec.num_key_value_heads)
    } else {
        let width = head_dim.unwrap_or(hidden_size / heads);
        (width, own(spec.num_key_value_heads, "num_key_value_heads")?.or(Some(heads)))
    };
    let key_heads = key_heads.unwrap_or_else(|| common_divisor(heads, USUAL_KEY_HEADS));
    if heads % key_heads != 0 {
        return Err(text.refuse("num_key_value_heads", "it must divide num_attention_heads"));
    }
    if head_dim < 2 {
        return Err(text.refuse("head_dim", "rotary embedding needs an even number"));
    }
    Ok(DraftAttentionShape {
        num_attention_heads: heads,
        num_key_value_heads: key_heads,
        // halves are rotated against each other
        head_dim: head_dim - head_dim % 2,
        intermediate_size: intermediate_size(text, spec, hidden_size)?,
    })
}

fn common_divisor(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Width of a dense MLP: the target's own if it has one, otherwise three times the hidden size.
/// `intermediate_size` may be an expert's width.
fn intermediate_size(text: &Fields, spec: &TargetSpec, hidden_size: i64) -> Result<i64> {
    if let Some(width) = spec.intermediate_size {
        return Ok(width);
    }
    let counts = EXPERTS.iter().map(|key| text.value(key));
    let has_experts = counts.flatten().any(|count| match count.as_array() {
        Some(counts) => counts.iter().any(|count| count.as_i64() > Some(1)),
        None => count.as_i64() > Some(1),
    });
    let has_dense_layers = text.value("first_k_dense_replace").and_then(|n| n.as_i64()) > Some(0);
    // Gemma 3n has a list with one width per layer.
    let width = |key: &str| {
        let value = text.value(key);
        let one = value.and_then(|value| value.as_array()).and_then(|list| list.first()).or(value);
        one.and_then(|width| width.as_i64()).filter(|&width| width > 0)
    };
    let dense = if has_experts && !has_dense_layers { None } else { width("intermediate_size") };
    Ok(dense.unwrap_or(3 * hidden_size))
}

/// RoPE settings of new configs, by layer type if given, or of old configs.
fn rope_parameters(text: &Fields) -> Result<Option<Fields>> {
    let Some(rope) = text.object("rope_parameters")?.or(text.object("rope_scaling")?) else {
        return Ok(None);
    };
    // A draft's layers see the whole context, as full layers do; DeepSeek V4 calls them main.
    for kind in ["full_attention", "main"] {
        if let Some(of_kind) = rope.object_if_any(kind) {
            return Ok(Some(of_kind));
        }
    }
    Ok(Some(rope))
}

fn theta(config: &Fields, text: &Fields, rope: Option<&Fields>) -> Result<f64> {
    if let Some(theta) = rope.map_or(Ok(None), |rope| rope.number("rope_theta"))? {
        return Ok(theta);
    }
    // First DeepSeek and Gemma releases; Transformers' default if absent.
    let said = text.number("rope_theta")?.or(config.number("rope_theta")?);
    Ok(said.unwrap_or(10_000.0))
}

fn scaling(rope: Option<&Fields>, notes: &mut Vec<String>) -> Result<Option<RopeScaling>> {
    let Some(rope) = rope else { return Ok(None) };
    Ok(match RopeScaling::wanted(rope)? {
        Wanted::Plain => None,
        Wanted::Scaled(scaling) => Some(scaling.with_usual_amplitude()),
        Wanted::Other(name) => {
            notes.push(format!(
                "the target's rotary scaling {name} is left out of the draft: engines do not serve \
                 drafts with it alike"
            ));
            None
        }
    })
}

fn partial_note(text: &Fields, rope: Option<&Fields>, notes: &mut Vec<String>) -> Result<()> {
    let key = "partial_rotary_factor";
    let of_rope = rope.map_or(Ok(None), |rope| rope.number(key))?;
    let factor = of_rope.or(text.number(key)?).or(text.number("rotary_pct")?);
    if let Some(factor) = factor.filter(|&factor| factor != 1.0) {
        notes.push(format!(
            "the target rotates {factor} of each head, the draft whole heads: SGLang and Transformers \
             pass over {key} in a draft, vLLM does not"
        ));
    }
    Ok(())
}
