"""Write a tiny random model of a family in its released format, with a byte tokenizer and a chat template, for
the dry runs of the recipes.

usage: tiny_family.py FAMILY DIR      FAMILY: one of those below

Needs torch, Transformers and tokenizers. Head sizes are supported by vLLM's CPU attention. Weights are large enough
that activations and logits are of order one, so that a wrong norm, scale or layer is noticed.
"""
import json, pathlib, sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast
import transformers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROWS = 320  # 256 bytes, the special tokens, and rows that no token uses
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON = dict(
    vocab_size=ROWS, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=2048, bos_token_id=256, eos_token_id=258, pad_token_id=256, tie_word_embeddings=False,
)
LINEAR = dict(
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=128, rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[2, 1, 1]),
)
QWEN_VISION = dict(
    depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=128, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
    num_position_embeddings=16, in_channels=3, deepstack_visual_indexes=[],
)
GEMMA = dict(
    COMMON, tie_word_embeddings=True, num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, sliding_window=64,
    final_logit_softcapping=30.0, global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=ROWS, num_kv_shared_layers=0, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", use_double_wide_mlp=False,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
)
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", dict(model_type="qwen3", **COMMON)),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", dict(
        model_type="qwen3_5", text_config=dict(COMMON, model_type="qwen3_5_text", **LINEAR), vision_config=QWEN_VISION, tie_word_embeddings=False,
        image_token_id=300, video_token_id=301, vision_start_token_id=302, vision_end_token_id=303)),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", dict(model_type="qwen3_5_text", **COMMON, **LINEAR)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", dict(
        model_type="qwen3_moe", **COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], rope_theta=1e7)),
    "gemma4": ("Gemma4ForConditionalGeneration", dict(
        model_type="gemma4", text_config=dict(GEMMA, model_type="gemma4_text"), tie_word_embeddings=True, audio_config=None,
        image_token_id=300, boi_token_id=301, eoi_token_id=302, audio_token_id=303, boa_token_id=304, eoa_token_id=305,
        vision_config=dict(
            model_type="gemma4_vision", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            head_dim=32, patch_size=16, position_embedding_size=64, pooling_kernel_size=3))),
    "gemma4_text": ("Gemma4ForCausalLM", dict(GEMMA, model_type="gemma4_text")),
    "gpt_oss": ("GptOssForCausalLM", dict(
        COMMON, model_type="gpt_oss", head_dim=64, num_local_experts=8, num_experts_per_tok=2, sliding_window=64, rms_norm_eps=1e-5,
        num_hidden_layers=10, layer_types=["sliding_attention", "full_attention"] * 5,
        rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                             original_max_position_embeddings=512))),
    "deepseek_v3": ("DeepseekV3ForCausalLM", dict(
        COMMON, model_type="deepseek_v3", num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
        head_dim=64, moe_intermediate_size=64, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, num_nextn_predict_layers=0,
        topk_method="noaux_tc", scoring_func="sigmoid",
        rope_parameters=dict(rope_type="yarn", rope_theta=50000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                             original_max_position_embeddings=512))),
}


def draw(model):
    "Weights in the order of their names: matrices by their inputs, vectors around what they are at the start."
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() < 2:
            weight.data += 0.1 * noise
        elif "embed" in name:
            weight.data = 0.5 * noise
        else:
            # Fused experts are [experts, inputs, outputs] in gpt-oss, and [experts, outputs, inputs] elsewhere.
            fan_in = weight.shape[-2] if weight.dim() == 3 and "GptOss" in type(model).__name__ else weight[0].numel() if weight.dim() != 3 else weight.shape[-1]
            weight.data = noise * fan_in**-0.5


def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE)


def main(family, out):
    architecture, values = FAMILIES[family]
    config = AutoConfig.for_model(**values)
    config.architectures = [architecture]
    model = getattr(transformers, architecture)(config).eval()
    draw(model)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer().save_pretrained(out)
    written = json.loads((pathlib.Path(out) / "config.json").read_text())
    assert written["architectures"] == [architecture], written["architectures"]


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
