//! Tiny random models on disk: a target with a byte tokenizer, and a matching draft.

use std::path::Path;

use dflash_draft::{Draft, DraftConfig, HeadFields, LayerKind};
use dflash_target::{Target, TargetConfig};
use dflash_test_support::{alone, byte_tokenizer};
use serde_json::{Value, json};
use tch::{Kind, Tensor, no_grad};

/// Ends a turn; the first id after the bytes.
const END: &str = "<|end|>";
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|end|>' }}\
    {% endfor %}{% if add_generation_prompt %}assistant{% if shout %}!{% endif %}: {% endif %}";

/// Writes a random target with a byte tokenizer, and a matching draft.
pub(crate) fn save_models(dir: &Path) {
    tch::set_num_threads(1);
    let _alone = alone();
    let mut config = TargetConfig::qwen3(32, 2, 260);
    config.max_position_embeddings = 512;
    config.eos_token_ids = vec![256];
    let target = Target::random(config.clone(), 5, tch::Device::Cpu);
    no_grad(|| {
        for (name, mut parameter) in target.parameters() {
            // Scaled so that texts vary and only letters are likely.
            if name.contains("embed") {
                let _ = parameter.narrow(0, 97, 26).g_mul_scalar_(12.0);
            } else if !name.contains("norm") {
                let _ = parameter.g_mul_scalar_(10.0);
            }
        }
    });
    let (target_dir, draft_dir) = (dir.join("target"), dir.join("draft"));
    target.save(&target_dir, Kind::Float).unwrap();
    let write = |name: &str, value: &Value| {
        std::fs::write(target_dir.join(name), value.to_string()).unwrap();
    };
    write("tokenizer.json", &byte_tokenizer(&[END]));
    write("tokenizer_config.json", &json!({"eos_token": END, "chat_template": TEMPLATE}));
    let draft = DraftConfig {
        hidden_size: config.hidden_size,
        intermediate_size: config.dense().intermediate_size,
        num_attention_heads: config.dense().num_attention_heads,
        num_key_value_heads: config.dense().num_key_value_heads,
        head_dim: config.dense().head_dim,
        attention_bias: false,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.dense().rope.theta,
        rope_scaling: None,
        layers: vec![LayerKind::Full],
        sliding_window: None,
        block_size: 4,
        mask_token_id: 259,
        target_layer_ids: vec![0, 2],
        num_target_layers: Some(2),
        vocab_size: 260,
        max_position_embeddings: 512,
        initializer_range: 0.3,
        eos_token_id: None,
        head: HeadFields::default(),
    };
    tch::manual_seed(3);
    let options = (Kind::Float, tch::Device::Cpu);
    let draft = Draft::init(draft, tch::Device::Cpu, |shape| Tensor::randn(shape, options));
    std::fs::create_dir(&draft_dir).unwrap();
    draft.save(&draft_dir).unwrap();
}
