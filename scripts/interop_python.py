"""Decodes prompts with a drafter in another project's own model code, and compares the acceptance with
`dflash eval --json`. Float32 on the CPU.

  zlab          z-lab's published model and loop, unchanged, from a checkout (--checkout DIR)
  speculators   speculators' model as `from_pretrained` loads our export, in a greedy loop
"""

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from interop import compare, messages_of, rows


def zlab(args, target):
    """A function from a prompt's ids to the tokens that each verify step yielded."""
    sys.path.insert(0, args.checkout)
    from dflash.model import DFlashDraftModel, dflash_generate

    draft = DFlashDraftModel.from_pretrained(args.draft, dtype=torch.float32).eval()
    # The loop times itself with CUDA's clock.
    torch.cuda.synchronize = lambda: None

    def decode(ids, stop_ids):
        stats = dflash_generate(draft, target, ids, args.tokens, stop_ids, 0.0, return_stats=True)
        return stats.acceptance_lengths

    return decode


def speculators(args, target):
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(args.draft)
    # The default is compiled for GPUs.
    config.transformer_layer_config._attn_implementation = "sdpa"
    draft = SpeculatorModel.from_pretrained(
        args.draft, config=config, verifier=args.target, dtype=torch.float32
    ).eval()
    draft.load_verifier_weights()
    layers, block = draft.target_layer_ids, draft.block_size
    # A drafter with a reduced vocabulary returns ids of that vocabulary.
    offsets = draft.d2t if draft.d2t is not None else torch.zeros(1, dtype=torch.long)

    def propose(ids, states):
        """Proposes the tokens after the last of `ids` [1, T], whose own states are unknown."""
        length = ids.shape[1]
        # Rows after the anchor, invisible to all: anchors are not drawn from the last block.
        padded = torch.nn.functional.pad(ids, (0, block))
        anchor = torch.zeros_like(padded, dtype=torch.float32)
        anchor[0, length - 1] = 1
        features = torch.zeros(1, padded.shape[1], states.shape[-1])
        features[:, : length - 1] = states
        last = torch.zeros(1, padded.shape[1], target.config.hidden_size)
        document = torch.zeros_like(padded)
        _, logits, *_ = draft._backbone_forward(features, padded, anchor, last, document, max_anchors=1)
        guess = logits[0, 1:].argmax(-1)
        return guess + (offsets[guess] if offsets.numel() > 1 else 0)

    @torch.inference_mode()
    def decode(ids, stop_ids):
        steps, end = [], ids.shape[1] + args.tokens
        out = target(ids, output_hidden_states=True)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        while ids.shape[1] < end and not set(stop_ids) & set(ids[0, end - args.tokens :].tolist()):
            states = torch.cat([out.hidden_states[k] for k in layers], -1)[:, : ids.shape[1] - 1]
            guess = propose(ids, states)
            out = target(torch.cat([ids, guess[None]], 1), output_hidden_states=True)
            own = out.logits[0, ids.shape[1] - 1 :].argmax(-1)
            accepted = int((own[:-1] == guess).cumprod(0).sum())
            steps.append(accepted + 1)
            ids = torch.cat([ids, own[None, : accepted + 1]], 1)
        return steps

    return decode


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["zlab", "speculators"])
    parser.add_argument("--name", required=True)
    parser.add_argument("--checkout")
    for flag in ["--target", "--draft", "--prompts", "--eval", "--table"]:
        parser.add_argument(flag, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--tolerance", type=float, required=True)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    stop_ids = target.generation_config.eos_token_id
    stop_ids = stop_ids if isinstance(stop_ids, list) else [stop_ids]
    decode = {"zlab": zlab, "speculators": speculators}[args.peer](args, target)
    steps = []
    prompts = rows(args.prompts)[: args.count]
    for number, row in enumerate(prompts, 1):
        text = tokenizer.apply_chat_template(messages_of(row), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        steps += decode(ids, stop_ids)
        if number % 10 == 0 or number == len(prompts):
            print(f"interop: {number}/{len(prompts)} prompts, {sum(steps)} tokens", file=sys.stderr)
    theirs = sum(steps) / len(steps)
    sys.exit(not compare(args.name, theirs, len(steps), args.eval, args.tolerance, args.table))


if __name__ == "__main__":
    main()
