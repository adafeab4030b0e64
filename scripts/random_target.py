"""Write a target with random weights, for benchmarks at the shape of a model that is not available: the files
that a training step needs (config.json, embedding, output projection, last norm), or with --full the whole model.

usage: random_target.py DIR [--full] [KEY=VALUE ...]      KEYs of config.json; the defaults are Qwen3-8B's,
dtype is "bfloat16" or "float32"

Needs nothing but Python. The same arguments give the same bytes.
"""
import json, pathlib, random, sys

CONFIG = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", dtype="bfloat16", hidden_act="silu", vocab_size=151936, hidden_size=4096,
    intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    rms_norm_eps=1e-6, rope_theta=1e6, initializer_range=0.02, attention_bias=False, attention_dropout=0.0, tie_word_embeddings=False,
    bos_token_id=151643, eos_token_id=151645, sliding_window=None, use_sliding_window=False)
# Bytes. Not a multiple of a row's size, so that all rows differ.
PIECE = (32 << 20) - 122
# The upper byte of a bfloat16 or float32: the sign and most of the exponent. With any lower bytes the number has either sign and
# a magnitude between 0.008 and 0.031; the root mean square is about the usual 0.02.
SIGNED = bytes(0x3C if byte % 2 else 0xBC for byte in range(256))
ONE = b"\x80\x3f"
STORED = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}


def layer(c):
    "Shapes of a layer's weights by name."
    h, i, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    attention = dict(q_proj=[q, h], k_proj=[kv, h], v_proj=[kv, h], o_proj=[h, q], q_norm=[d], k_norm=[d])
    mlp = dict(gate_proj=[i, h], up_proj=[i, h], down_proj=[h, i])
    return {**{f"self_attn.{name}.weight": shape for name, shape in attention.items()}, **{f"mlp.{name}.weight": shape for name, shape in mlp.items()},
            "input_layernorm.weight": [h], "post_attention_layernorm.weight": [h]}


def shapes(c, full):
    rows = [c["vocab_size"], c["hidden_size"]]
    found = {"model.embed_tokens.weight": rows, "model.norm.weight": rows[1:]}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = rows
    for index in range(c["num_hidden_layers"] if full else 0):
        found |= {f"model.layers.{index}.{name}": shape for name, shape in layer(c).items()}
    return found


def random_piece(width):
    "Random weights of so many bytes each: all tensors are made of this one piece, since drawing 16 GB takes minutes."
    drawn = random.Random(0).randbytes(PIECE // width * width)
    piece = bytearray(drawn)
    piece[width - 1::width] = drawn[width - 1::width].translate(SIGNED)
    return memoryview(piece)


def numbers(piece, count, width):
    "So many weights, from the piece's beginning, again and again."
    while count:
        part = min(count, PIECE // width)
        yield piece[:width * part]
        count -= part


def main(out, *arguments):
    full = "--full" in arguments
    pairs = (argument.split("=", 1) for argument in arguments if argument != "--full")
    config = CONFIG | {key: json.loads(value) for key, value in pairs}
    stored, width = STORED[config["dtype"]]
    tensors, header, end = shapes(config, full), {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = dict(dtype=stored, shape=shape, data_offsets=[end, end := end + width * count])
    out = pathlib.Path(out)
    out.mkdir(parents=True)
    piece, text = random_piece(width), json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(out / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            begin, end = header[name]["data_offsets"]
            for part in numbers(piece, (end - begin) // width, width) if len(shape) > 1 else [ONE.rjust(width, b"\0") * shape[0]]:
                file.write(part)
    (out / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    # A flag mistaken for the directory would create a model of gigabytes with that name.
    named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    main(*sys.argv[1:]) if named else sys.exit(__doc__)
