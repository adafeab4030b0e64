//! ggml's types, and llama.cpp's keys.

use std::path::PathBuf;

use dflash_draft::{DraftConfig, LayerKind};
use dflash_formats::gguf::Value;
use dflash_test_support::byte_tokenizer;

use super::*;

fn wave(count: i64) -> Tensor {
    let positions = Tensor::arange(count, (Kind::Float, Device::Cpu));
    (positions * 1.3).sin() * 0.7
}

/// A file with one tensor of each type.
fn sample(dir: &tempfile::TempDir) -> PathBuf {
    let path = dir.path().join("x.gguf");
    let tensors = [
        Named::new("f32", TensorType::F32, wave(6).view([2, 3])),
        Named::new("q8", TensorType::Q80, wave(128).view([2, 64])),
        Named::new("bf16", TensorType::Bf16, wave(5)),
        Named::new("f16", TensorType::F16, wave(5)),
        Named::new("ids", TensorType::I64, Tensor::from_slice(&[3i64, 1 << 40])),
    ];
    tensors::write(&path, &[], &tensors).unwrap();
    path
}

fn read(file: &GgufFile, name: &str, shape: &[i64], kind: Kind) -> Tensor {
    let tensor = Tensor::zeros(shape, (kind, Device::Cpu));
    read_into(file, name, &tensor).unwrap();
    tensor
}

#[test]
fn what_is_written_reads_back_in_every_type() {
    let dir = tempfile::tempdir().unwrap();
    let file = GgufFile::open(&sample(&dir)).unwrap();
    assert!(read(&file, "f32", &[2, 3], Kind::Float).equal(&wave(6).view([2, 3])));
    let rounded = |kind| wave(5).to_kind(kind).to_kind(Kind::Float);
    assert!(read(&file, "bf16", &[5], Kind::Float).equal(&rounded(Kind::BFloat16)));
    assert!(read(&file, "f16", &[5], Kind::Float).equal(&rounded(Kind::Half)));
    let ids = read(&file, "ids", &[2], Kind::Int64);
    assert_eq!(Vec::<i64>::try_from(ids).unwrap(), [3, 1 << 40]);
    let error = read_into(&file, "f32", &Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)));
    assert!(error.unwrap_err().to_string().contains("shape [2, 3], expected [3, 2]"));
}

fn config() -> DraftConfig {
    let text = r#"{
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0, "vocab_size": 260, "max_position_embeddings": 512, "block_size": 8,
        "dflash_config": {"mask_token_id": 258, "target_layer_ids": [1, 2, 4]}
    }"#;
    DraftConfig::parse(Path::new("config.json"), text).unwrap()
}

/// The metadata of `config`, whose target's tokenizer has the 256 bytes and one special token.
fn metadata(config: &DraftConfig) -> std::collections::BTreeMap<String, Value> {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(&["<eos>"]).to_string();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    let identity =
        TargetIdentity { name: "t".into(), config: "1".into(), weights: Some("2".into()) };
    let keys = keys::of(config, ExportDtype::Bf16, &tokenizer, &identity).unwrap();
    keys.into_iter().collect()
}

/// Names and values as the converter of llama.cpp (gguf-py 0.19) writes them for such a draft.
#[test]
fn names_and_keys_are_llama_cpps() {
    let layout = DraftLayout::new(&config());
    let mut names: Vec<String> =
        layout.parameters().iter().map(|parameter| tensor_name(&parameter.name)).collect();
    assert_eq!(names[2], "blk.0.attn_q.weight");
    let role = |ours: &str| tensor_name(&format!("layers.3.{ours}.weight"));
    assert_eq!(role("mlp.gate_proj"), "blk.3.ffn_gate.weight");
    assert_eq!(role("mlp.up_proj"), "blk.3.ffn_up.weight");
    assert_eq!(role("self_attn.k_proj"), "blk.3.attn_k.weight");
    assert_eq!(role("self_attn.v_proj"), "blk.3.attn_v.weight");
    assert_eq!(role("input_layernorm"), "blk.3.attn_norm.weight");
    assert_eq!(role("post_attention_layernorm"), "blk.3.ffn_norm.weight");
    assert_eq!(role("self_attn.q_norm"), "blk.3.attn_q_norm.weight");
    names.sort();
    let expected = "blk.0.attn_k.weight blk.0.attn_k_norm.weight blk.0.attn_norm.weight \
        blk.0.attn_output.weight blk.0.attn_q.weight blk.0.attn_q_norm.weight blk.0.attn_v.weight \
        blk.0.ffn_down.weight blk.0.ffn_gate.weight blk.0.ffn_norm.weight blk.0.ffn_up.weight \
        enc.output_norm.weight fc.weight output_norm.weight";
    assert_eq!(names.join(" "), expected);

    let keys = metadata(&config());
    let integers = [
        ("block_count", 1),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("block_size", 8),
    ];
    for (key, value) in integers {
        assert_eq!(keys[&format!("dflash.{key}")], Value::Integer(value), "{key}");
    }
    // z-lab's ids count the outputs of layers, llama.cpp's the inputs.
    assert_eq!(keys["dflash.target_layers"], Value::Integers(vec![2, 3, 5]));
    assert_eq!(keys["dflash.rope.freq_base"], Value::Float(500_000.0));
    assert_eq!(keys["dflash.attention.layer_norm_rms_epsilon"], Value::Float(1e-6));
    assert_eq!(keys["general.file_type"], Value::Integer(32));
    assert_eq!(keys["tokenizer.ggml.mask_token_id"], Value::Integer(258));
    assert!(!keys.contains_key("dflash.attention.causal"));
    let Value::Texts(tokens) = &keys["tokenizer.ggml.tokens"] else { panic!("no tokens") };
    assert_eq!((tokens.len(), &*tokens[256], &*tokens[259]), (260, "<eos>", "[PAD259]"));
    let Value::Integers(types) = &keys["tokenizer.ggml.token_type"] else { panic!("no types") };
    assert_eq!(types[255..], [1, 3, 5, 5, 5]);

    let sliding =
        DraftConfig { layers: vec![LayerKind::Sliding], sliding_window: Some(16), ..config() };
    let keys = metadata(&sliding);
    assert_eq!(keys["dflash.attention.causal"], Value::Flag(true));
    assert_eq!(keys["dflash.attention.sliding_window"], Value::Integer(16));
    assert_eq!(keys["dflash.attention.sliding_window_pattern"], Value::Flags(vec![true]));
}

/// The first block of `q8` as gguf-py 0.19 quantizes and dequantizes the same values.
#[test]
fn q8_0_is_ggmls() {
    let dir = tempfile::tempdir().unwrap();
    let path = sample(&dir);
    let bytes = std::fs::read(&path).unwrap();
    let block: Vec<u8> = include_str!("q8_block.hex")
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    assert_eq!(block.len(), 34);
    assert!(bytes.windows(34).any(|window| window == block), "{block:x?}");
    let read = read(&GgufFile::open(&path).unwrap(), "q8", &[2, 64], Kind::Float);
    let difference = (read - wave(128).view([2, 64])).abs().max().double_value(&[]);
    assert!((1e-4..0.7 / 127.0 * 0.6).contains(&difference), "{difference}");
}
