//! A draft's configuration as GGUF metadata.

use dflash_chat::{ChatTokenizer, TokenUse};
use dflash_draft::{DraftConfig, HeadFields, LayerKind};
use dflash_formats::draft::ARCHITECTURE;
use dflash_formats::gguf::{GgufFile, Value};
use dflash_identity::TargetIdentity;
use dflash_settings::ExportDtype;

use dflash_formats::Result;

/// Our own key: the target that the draft was made for, as JSON. llama.cpp ignores it.
const TARGET: &str = "dflash.made_for";

const MASK: &str = "tokenizer.ggml.mask_token_id";
const TOKENS: &str = "tokenizer.ggml.tokens";
const WINDOW: &str = "attention.sliding_window";
const CAUSAL: &str = "attention.causal";

/// Keys that are present only in other types of drafters.
const OTHER_DRAFTERS: [&str; 4] =
    ["conv_kernel_size", "selector_rank", "hyper_connection.count", "sample_from_anchor"];

/// llama.cpp's file type numbers.
fn file_type(dtype: ExportDtype) -> i64 {
    match dtype {
        ExportDtype::F32 => 0,
        ExportDtype::F16 => 1,
        ExportDtype::Q80 => 7,
        ExportDtype::Bf16 => 32,
    }
}

/// All keys of the file.
///
/// # Errors
/// A tokenizer with more tokens than the target has rows.
pub(super) fn of(
    config: &DraftConfig,
    dtype: ExportDtype,
    tokenizer: &ChatTokenizer,
    identity: &TargetIdentity,
) -> crate::Result<Vec<(String, Value)>> {
    let integer = |number: i64| Value::Integer(number);
    let text = |text: &str| Value::Text(text.into());
    let layers = config.target_layer_ids.iter().map(|&id| id.into()).collect();
    let mut own = vec![
        ("block_count", integer(config.layers.len() as i64)),
        ("context_length", integer(config.max_position_embeddings)),
        ("embedding_length", integer(config.hidden_size)),
        ("feed_forward_length", integer(config.intermediate_size)),
        ("attention.head_count", integer(config.num_attention_heads)),
        ("attention.head_count_kv", integer(config.num_key_value_heads)),
        ("attention.key_length", integer(config.head_dim)),
        ("attention.value_length", integer(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", Value::Float(config.rms_norm_eps)),
        ("rope.freq_base", Value::Float(config.rope_theta)),
        ("rope.dimension_count", integer(config.head_dim)),
        ("block_size", integer(config.block_size as i64)),
        ("target_layers", Value::Integers(layers)),
    ];
    if let Some(window) = config.sliding_window {
        let slides = config.layers.iter().map(|&layer| layer == LayerKind::Sliding).collect();
        own.push((WINDOW, integer(window as i64)));
        own.push(("attention.sliding_window_pattern", Value::Flags(slides)));
        // One value for all layers; not causal if the key is absent.
        own.push((CAUSAL, Value::Flag(true)));
    }
    let own = own.into_iter().map(|(key, value)| (format!("{ARCHITECTURE}.{key}"), value));
    let general = [
        ("general.architecture", text(ARCHITECTURE)),
        ("general.type", text("model")),
        ("general.name", Value::Text(format!("DFlash draft for {}", identity.name))),
        ("general.file_type", integer(file_type(dtype))),
        ("general.quantization_version", integer(2)),
        (TARGET, Value::Text(serde_json::to_string(identity).expect("strings print"))),
    ]
    .map(|(key, value)| (key.to_owned(), value));
    Ok(general.into_iter().chain(own).chain(vocabulary(config, tokenizer)).collect())
}

/// Names of the target's tokens, one per embedding row, and their types.
fn vocabulary(config: &DraftConfig, tokenizer: &ChatTokenizer) -> Vec<(String, Value)> {
    let (mut tokens, mut types) = (Vec::new(), Vec::new());
    for id in 0..config.vocab_size as u32 {
        let (name, token_type) = match tokenizer.token(id) {
            Some((name, TokenUse::Text)) => (name, 1),
            Some((name, TokenUse::Special)) => (name, 3),
            Some((name, TokenUse::Added)) => (name, 4),
            // llama.cpp's converter names unused rows this way.
            None => (format!("[PAD{id}]"), 5),
        };
        tokens.push(name);
        types.push(token_type);
    }
    [
        ("tokenizer.ggml.model", Value::Text("gpt2".into())),
        ("tokenizer.ggml.pre", Value::Text("default".into())),
        (TOKENS, Value::Texts(tokens)),
        ("tokenizer.ggml.token_type", Value::Integers(types)),
        ("tokenizer.ggml.merges", Value::Texts(Vec::new())),
        (MASK, Value::Integer(config.mask_token_id)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// The configuration described by the metadata, which does not include the target's depth.
///
/// # Errors
/// Another architecture or type of drafter, a missing key.
pub(super) fn parse(file: &GgufFile) -> Result<(DraftConfig, Option<TargetIdentity>)> {
    let expected = "only drafts of the architecture dflash can be read";
    let is_ours = |value: &Value| (*value == Value::Text(ARCHITECTURE.into())).then_some(());
    file.required("general.architecture", expected, is_ours)?;
    for key in OTHER_DRAFTERS.map(own) {
        if file.value(&key).is_some_and(|value| *value != Value::Flag(false)) {
            return Err(file.refuse(&key, "there", "only plain DFlash drafters can be read"));
        }
    }
    let count = size(file, &own("block_count"), 1 << 10)? as usize;
    let window = file.value(&own(WINDOW)).is_some();
    let window = window.then(|| size(file, &own(WINDOW), 1 << 24)).transpose()?;
    let layers = layers(file, count, window.is_some())?;
    let expected = "a list of the target's tokens is needed";
    let tokens = |value: &Value| if let Value::Texts(it) = value { Some(it.len()) } else { None };
    let vocab_size = file.required(TOKENS, expected, tokens)? as i64;
    let config = DraftConfig {
        hidden_size: size(file, &own("embedding_length"), 1 << 20)?,
        intermediate_size: size(file, &own("feed_forward_length"), 1 << 24)?,
        num_attention_heads: size(file, &own("attention.head_count"), 1 << 12)?,
        num_key_value_heads: size(file, &own("attention.head_count_kv"), 1 << 12)?,
        head_dim: size(file, &own("attention.key_length"), 1 << 16)?,
        attention_bias: false,
        rms_norm_eps: number(file, &own("attention.layer_norm_rms_epsilon"))?,
        rope_theta: number(file, &own("rope.freq_base"))?,
        rope_scaling: None,
        sliding_window: window
            .filter(|_| layers.contains(&LayerKind::Sliding))
            .map(|window| window as usize),
        layers,
        block_size: size(file, &own("block_size"), 1 << 10)? as usize,
        mask_token_id: mask_token(file, vocab_size)?,
        target_layer_ids: target_layers(file)?,
        num_target_layers: None,
        vocab_size,
        max_position_embeddings: size(file, &own("context_length"), 1 << 40)?,
        // Hugging Face's default for the Qwen family.
        initializer_range: 0.02,
        eos_token_id: None,
        head: HeadFields::default(),
    };
    check_heads(file, &config)?;
    Ok((config, identity(file)?))
}

fn check_heads(file: &GgufFile, config: &DraftConfig) -> Result<()> {
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    if heads % kv_heads != 0 {
        let expected = "it must divide attention.head_count";
        return Err(file.refuse(&own("attention.head_count_kv"), &kv_heads.to_string(), expected));
    }
    let expected = "only plain rotary embedding over whole heads is implemented for drafts";
    for key in ["rope.dimension_count", "attention.value_length"].map(own) {
        if file.value(&key).is_some_and(|value| *value != Value::Integer(config.head_dim)) {
            return Err(file.refuse(&key, "not the heads' width", expected));
        }
    }
    let scaling = own("rope.scaling.type");
    match file.value(&scaling) {
        None => Ok(()),
        Some(Value::Text(kind)) if kind == "none" => Ok(()),
        Some(other) => Err(file.refuse(&scaling, &format!("{other:?}"), expected)),
    }
}

fn own(key: &str) -> String {
    format!("{ARCHITECTURE}.{key}")
}

/// A size from 1 to `most`. The bounds exceed any model and keep products of sizes within 64 bits.
fn size(file: &GgufFile, key: &str, most: i64) -> Result<i64> {
    let in_range = |value: &Value| match value {
        Value::Integer(number) if (1..=most).contains(number) => Some(*number),
        _ => None,
    };
    file.required(key, &format!("a number from 1 to {most} is needed"), in_range)
}

fn mask_token(file: &GgufFile, rows: i64) -> Result<i64> {
    let row = |value: &Value| match value {
        Value::Integer(id) if (0..rows).contains(id) => Some(*id),
        _ => None,
    };
    file.required(MASK, &format!("one of the {rows} tokens is needed"), row)
}

fn number(file: &GgufFile, key: &str) -> Result<f64> {
    let float = |value: &Value| if let Value::Float(it) = value { Some(*it) } else { None };
    file.required(key, "a number is needed", float)
}

fn layers(file: &GgufFile, count: usize, windowed: bool) -> Result<Vec<LayerKind>> {
    if !windowed {
        let causal = own(CAUSAL);
        return match file.value(&causal) {
            Some(Value::Flag(true)) => {
                Err(file.refuse(&causal, "true", "full layers see their whole block"))
            }
            _ => Ok(vec![LayerKind::Full; count]),
        };
    }
    let key = own("attention.sliding_window_pattern");
    let list = |value: &Value| match value {
        Value::Flags(list) if list.len() == count => Some(list.clone()),
        _ => None,
    };
    let flags = file.required(&key, "true or false for each layer is needed", list)?;
    let causal = file.value(&own(CAUSAL)) == Some(&Value::Flag(true));
    if flags.iter().any(|&slides| slides != causal) {
        let expected = "sliding layers are causal in their block and full layers are not, and \
                        llama.cpp has one causality for all";
        return Err(file.refuse(&own(CAUSAL), &causal.to_string(), expected));
    }
    let kind = |slides| if slides { LayerKind::Sliding } else { LayerKind::Full };
    Ok(flags.into_iter().map(kind).collect())
}

fn target_layers(file: &GgufFile) -> Result<Vec<u32>> {
    let ids = |value: &Value| {
        let Value::Integers(list) = value else { return None };
        let ids: Vec<u32> = list.iter().map(|&id| u32::try_from(id).ok()).collect::<Option<_>>()?;
        let fits = (1..=1 << 10).contains(&ids.len());
        (fits && ids.is_sorted_by(|a, b| a < b)).then_some(ids)
    };
    file.required(&own("target_layers"), "ascending layer numbers are needed", ids)
}

fn identity(file: &GgufFile) -> Result<Option<TargetIdentity>> {
    let expected = "the identity of a target is needed";
    let parse = |value: &Value| match value {
        Value::Text(text) => serde_json::from_str(text).ok(),
        _ => None,
    };
    file.value(TARGET).is_some().then(|| file.required(TARGET, expected, parse)).transpose()
}
