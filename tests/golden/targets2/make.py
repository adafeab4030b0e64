"""Makes those vectors beside this file whose names it lists: tiny random hybrids with four heads of each kind, or
more, for targets divided among four ranks.

A folder holds config.json, model.safetensors and golden.safetensors: `input_ids` [40], `hidden_states`
[layers + 1, 40, H] before the final norm, `logits` [40, V], and `decode_logits` [8, V] of the last tokens one by
one behind a cache of the first 32. Run with transformers 5.17 and torch 2.11:
    python make.py FOLDER
"""
import pathlib
import sys

import torch
from safetensors.torch import save_file
import transformers as t

TOKENS, CACHED = 40, 32
SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=256, linear_key_head_dim=8,
             linear_num_key_heads=4, linear_num_value_heads=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
             layer_types=["linear_attention", "full_attention"], tie_word_embeddings=False,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
# Of a router's logits, whose size is one.
MARGIN = 0.05
CASES = {
    "qwen3_5_four_heads": lambda: t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**SMALL)),
    "qwen3_next_four_heads": lambda: t.Qwen3NextForCausalLM(t.Qwen3NextConfig(**SMALL, **EXPERTS)),
}


def states(model, ids):
    """The residual stream before each layer, and behind the last one."""
    inner, seen = model.model, []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for layer in inner.layers]
    hooks.append(inner.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])))
    logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return torch.cat(seen), logits[0]


def decoded(model, ids):
    past = model(input_ids=ids[:, :CACHED], use_cache=True).past_key_values
    rows = []
    for token in range(CACHED, TOKENS):
        out = model(input_ids=ids[:, token:token + 1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


def margin(model, ids):
    """By how much the last expert that any token chooses is ahead of the next one, at least."""
    gaps = []

    def router(module, inputs):
        ranked = (inputs[0].reshape(-1, inputs[0].shape[-1]) @ module.weight.T).sort(descending=True).values
        top_k = EXPERTS["num_experts_per_tok"]
        gaps.append((ranked[:, top_k - 1] - ranked[:, top_k]).min().item())

    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_pre_hook(router) for gate in routers]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(gaps, default=float("inf"))


def make(name, build, out):
    # In bfloat16 too the same experts must be chosen.
    for seed in range(11, 10_000):
        model, golden = draw(build, seed)
        if golden["margin"] > MARGIN:
            break
    else:
        sys.exit(f"{name}: every seed has a router near a tie")
    del golden["margin"]
    model.save_pretrained(out / name)
    save_file({key: value.contiguous() for key, value in golden.items()}, out / name / "golden.safetensors")


def draw(build, seed):
    torch.manual_seed(seed)
    model = build().float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                # Activations stay near one.
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
        ids = torch.randint(3, SMALL["vocab_size"], (1, TOKENS))
        near = margin(model, ids)
        if near <= MARGIN:
            return model, dict(margin=near)
        hidden, logits = states(model, ids)
        rows = decoded(model, ids)
    return model, dict(margin=near, input_ids=ids[0], hidden_states=hidden, logits=logits, decode_logits=rows)


for case, builder in CASES.items():
    make(case, builder, pathlib.Path(sys.argv[1]))
