"""Runs llama.cpp's converter, and helps it with tokenizers that it does not know.

usage: llama_cpp_convert.py SOURCE [ARGUMENT...]      SOURCE: llama.cpp's source; the rest is for its converter

The converter tells the ways of splitting text apart by a hash of what a tokenizer makes of a test text, and refuses
tokenizers whose hash it does not know. One that splits as GPT-2 does is split by its "gpt-2", and one that splits off
each digit before that by its "smollm", whatever the tokens are. LLAMA_CPP_PRE names the way of any other.
"""

import json
import os
import pathlib
import runpy
import sys

from conversion import base


def way_of_splitting(model):
    """The converter's name of how the tokenizer of `model` splits text, if it is one of these two."""
    tokenizer = json.loads((pathlib.Path(model) / "tokenizer.json").read_text(encoding="utf-8"))
    first = tokenizer["pre_tokenizer"] or {}
    steps = first.get("pretokenizers", [first])
    last = steps[-1]
    as_gpt2 = last.get("type") == "ByteLevel" and last.get("use_regex", True) and not last["add_prefix_space"]
    if as_gpt2 and len(steps) == 1:
        return "gpt-2"
    if as_gpt2 and len(steps) == 2 and steps[0]["type"] == "Digits" and steps[0]["individual_digits"]:
        return "smollm"
    return None


by_hash = base.TextModel.get_vocab_base_pre


def by_hash_or_rule(self, tokenizer):
    try:
        return by_hash(self, tokenizer)
    except NotImplementedError:
        way = os.environ.get("LLAMA_CPP_PRE") or way_of_splitting(self.dir_model)
        if way is None:
            raise
        return way


base.TextModel.get_vocab_base_pre = by_hash_or_rule
script = str(pathlib.Path(sys.argv[1]) / "convert_hf_to_gguf.py")
sys.argv = [script, *sys.argv[2:]]
runpy.run_path(script, run_name="__main__")
