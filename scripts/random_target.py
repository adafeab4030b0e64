"""Write what a training step needs of a target, with random weights: config.json, the embedding, the output projection
and the last norm, in bfloat16. For benchmarks at the shape of a model that is not at hand.

usage: random_target.py DIR [KEY=VALUE ...]      KEYs of config.json; the defaults are Qwen3-8B's
"""
import json, pathlib, sys
import torch
from safetensors.torch import save_file

config = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", dtype="bfloat16", hidden_act="silu", vocab_size=151936, hidden_size=4096,
    intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    rms_norm_eps=1e-6, rope_theta=1e6, initializer_range=0.02, attention_bias=False, attention_dropout=0.0, tie_word_embeddings=False,
    bos_token_id=151643, eos_token_id=151645, sliding_window=None, use_sliding_window=False)
out = pathlib.Path(sys.argv[1])
config |= {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in sys.argv[2:])}
out.mkdir(parents=True)
torch.manual_seed(0)
shape = (config["vocab_size"], config["hidden_size"])
rows = lambda: (torch.randn(shape) * config["initializer_range"]).bfloat16()
weights = {"model.embed_tokens.weight": rows(), "lm_head.weight": rows(), "model.norm.weight": torch.ones(shape[1]).bfloat16()}
save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
(out / "config.json").write_text(json.dumps(config, indent=2))
