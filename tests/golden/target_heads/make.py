"""Makes the vectors beside this file: tiny random models of families whose heads differ.

Of each model only what lies outside its layers is kept: config.json, embedding, final norm, output
projection. `golden.safetensors` holds `input_ids` [T], `embedded` [T, H] (what layer 0 receives), `last`
[T, H] (what the final norm receives) and `logits` [T, V]. Run with transformers 5.17 and torch 2.11:
    python make.py FOLDER
"""
import json
import pathlib
import shutil
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
import transformers as t

SMALL = dict(vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
               n_shared_experts=1, first_k_dense_replace=1)
LATENT = dict(q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)


def text(**more):
    return {**SMALL, **more}


CASES = {
    "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**text(embedding_multiplier=12.0, logits_scaling=8.0,
        residual_multiplier=0.22, attention_multiplier=0.1))),
    "granitemoe_tied": lambda: t.GraniteMoeForCausalLM(t.GraniteMoeConfig(**text(embedding_multiplier=6.0, logits_scaling=4.0,
        num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True))),
    "nemotron": lambda: t.NemotronForCausalLM(t.NemotronConfig(**text())),
    "nemotron_h": lambda: t.NemotronHForCausalLM(t.NemotronHConfig(**{**text(layers_block_type=["mamba", "attention"],
        mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=1, head_dim=8, chunk_size=8,
        layer_norm_epsilon=1e-4)})),
    "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**text(head_dim=8, final_logit_softcapping=2.0))),
    "gemma3_nested": lambda: t.Gemma3ForConditionalGeneration(t.Gemma3Config(
        text_config=text(head_dim=8, model_type="gemma3_text"), vision_config={**VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4)),
    "gemma3n": lambda: t.Gemma3nForCausalLM(t.Gemma3nTextConfig(**text(head_dim=8, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=80, num_kv_shared_layers=0, laurel_rank=4, activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=2.0))),
    "olmo3": lambda: t.Olmo3ForCausalLM(t.Olmo3Config(**text())),
    "seed_oss": lambda: t.SeedOssForCausalLM(t.SeedOssConfig(**text(head_dim=8))),
    "ernie4_5": lambda: t.Ernie4_5ForCausalLM(t.Ernie4_5Config(**text(head_dim=8))),
    "hunyuan": lambda: t.HunYuanDenseV1ForCausalLM(t.HunYuanDenseV1Config(**text(head_dim=8))),
    "glm4": lambda: t.Glm4ForCausalLM(t.Glm4Config(**text(head_dim=8))),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**text(num_local_experts=4))),
    "ministral3": lambda: t.Ministral3ForCausalLM(t.Ministral3Config(**text(head_dim=8))),
    "mistral3_nested": lambda: t.Mistral3ForConditionalGeneration(t.Mistral3Config(tie_word_embeddings=False,
        text_config=text(head_dim=8, model_type="mistral"), vision_config={**VISION, "model_type": "pixtral", "head_dim": 8})),
    "phimoe": lambda: t.PhimoeForCausalLM(t.PhimoeConfig(**text(num_local_experts=4, num_experts_per_tok=2, lm_head_bias=True))),
    "cohere": lambda: t.CohereForCausalLM(t.CohereConfig(**text(logit_scale=0.25))),
    "qwen2_moe": lambda: t.Qwen2MoeForCausalLM(t.Qwen2MoeConfig(**text(moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2))),
    "glm_moe_dsa": lambda: t.GlmMoeDsaForCausalLM(t.GlmMoeDsaConfig(**{**text(**LATENT, **EXPERTS),
        "num_key_value_heads": 4, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 16})),
    "kimi_k25": lambda: t.Kimi_K25ForConditionalGeneration(t.Kimi_K25Config(tie_word_embeddings=False,
        text_config={**text(**LATENT, **EXPERTS), "num_key_value_heads": 4, "model_type": "deepseek_v3"},
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
        projection_hidden_size=16)),
}
OUTER = ("embed_tokens.weight", "embeddings.weight", "norm.weight", "norm.bias", "norm_f.weight", "lm_head.weight", "lm_head.bias")
KEPT_OUT = ("layers.", "blocks.", "vision", "vis", "projector", "per_layer")


def final_norm(model):
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    return getattr(inner, "norm", None) or inner.norm_f, inner


def make(name, build, out):
    torch.manual_seed(7)
    model = build().float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() < 2 or "lm_head.bias" in key:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                weight.copy_(torch.randn_like(weight) * (0.5 if "embed" in key or "lm_head" in key else 0.15))
    model.tie_weights()
    seen = {}
    norm, inner = final_norm(model)
    norm.register_forward_pre_hook(lambda _, args, kwargs: seen.update(last=(args or tuple(kwargs.values()))[0][0].clone()), with_kwargs=True)
    inner.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(first=(args[0] if args else kwargs["hidden_states"]).clone()), with_kwargs=True)
    ids = torch.randint(3, 80, (1, 12))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    first = seen["first"]
    first = first[0, 0] if first.dim() == 4 and first.shape[0] != 1 else first[0]
    with tempfile.TemporaryDirectory() as whole:
        model.save_pretrained(whole)
        stored = {}
        for file in pathlib.Path(whole).glob("*.safetensors"):
            stored.update(load_file(file))
        kept = {key: value.contiguous() for key, value in stored.items()
                if key.endswith(OUTER) and not any(part in key for part in KEPT_OUT)}
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(pathlib.Path(whole) / "config.json", folder / "config.json")
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    golden = {"input_ids": ids[0], "embedded": first.contiguous(), "last": seen["last"].contiguous(), "logits": logits.float().contiguous()}
    save_file(golden, folder / "golden.safetensors")
    print(name, sorted(kept), {k: tuple(v.shape) for k, v in golden.items()}, flush=True)


def main():
    out = pathlib.Path(sys.argv[1])
    for name, build in CASES.items():
        make(name, build, out)


main()
