"""Times training steps of speculators' DFlash trainer on made-up rows: forward, backward, clipping and AdamW, as
`dflash bench train-step` does ours. Prints one JSON line with the same keys.

usage: speculators_step.py TARGET [--tokens T] [--anchors A] [--docs D] [--block B] [--layers L] [--aux-layers K]
                           [--steps N] [--device cpu|cuda]
"""

import argparse
import json
import resource
import statistics
import time

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel
from transformers import AutoConfig, Qwen3Config

WARM_UP = 2
# What the draft takes from the target's configuration.
FROM_TARGET = [
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps",
]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    sizes = dict(tokens=2048, anchors=128, docs=8, block=16, layers=5, aux_layers=5, steps=5)
    for name, default in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def auxiliary_layers(count, layers):
    """`count` layers from the first to the last but one, evenly spread."""
    step = (layers - 2) / max(1, count - 1)
    return [min(layers - 1, 1 + round(number * step)) for number in range(count)]


def draft(args, target):
    shape = {key: getattr(target, key) for key in FROM_TARGET}
    config = Qwen3Config(
        **shape, num_hidden_layers=args.layers, layer_types=["full_attention"] * args.layers, tie_word_embeddings=False
    )
    model = DFlashDraftModel.from_training_args(
        verifier_config=config,
        verifier_name_or_path=args.target,
        t2d=None,
        d2t=None,
        draft_vocab_size=target.vocab_size,
        mask_token_id=target.vocab_size - 1,
        block_size=args.block,
        target_layer_ids=auxiliary_layers(args.aux_layers, target.num_hidden_layers),
        draft_attn_impl="sdpa" if args.device == "cpu" else "simple_flex_attention",
    )
    return model.to(args.device).float().train()


def row(args, target):
    """A packed row of documents of equal length, but for the last."""
    length = -(-args.tokens // args.docs)
    place = torch.arange(args.tokens)
    features = len(auxiliary_layers(args.aux_layers, target.num_hidden_layers)) * target.hidden_size
    tensors = dict(
        hidden_states=torch.randn(args.tokens, features),
        verifier_last_hidden_states=torch.randn(args.tokens, target.hidden_size),
        input_ids=torch.randint(0, target.vocab_size - 8, (args.tokens,)),
        loss_mask=torch.ones(args.tokens),
        document_ids=place // length,
        position_ids=place % length,
    )
    return {name: tensor[None].to(args.device) for name, tensor in tensors.items()}


def main():
    args = arguments()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    target = AutoConfig.from_pretrained(args.target)
    model, inputs = draft(args, target), row(args, target)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-4)
    loss_config = resolve_loss_config("ce", "fused" if on_gpu else "eager")

    def step():
        with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
            loss = model(**inputs, loss_config=loss_config, gamma=7.0, max_anchors=args.anchors)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        return loss

    times = []
    for _ in range(WARM_UP + args.steps):
        start = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARM_UP:])
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    slots = args.anchors * (args.block - 1)
    print(json.dumps({
        "peer": "speculators",
        "step_ms": round(seconds * 1e3, 1),
        "slots_per_s": round(slots / seconds),
        "loss": round(loss.item(), 4),
        "peak_mib": round(peak),
        "params_m": round(sum(parameter.numel() for parameter in trained) / 1e6, 2),
    }))


if __name__ == "__main__":
    main()
