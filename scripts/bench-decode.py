"""Helper of bench-decode.sh that talks to engines: sends prompts one at a time to a server with
OpenAI's chat completions, or decodes them with Transformers, and makes the table.

    ready URL | ask URL PROMPTS COUNT TOKENS | transformers TARGET PROMPTS COUNT TOKENS DTYPE | table FILE

All but `transformers` need the standard library only.
"""

import json
import statistics
import sys
import time
import urllib.error
import urllib.request

from interop import messages_of, post, rows


def ready(url):
    try:
        urllib.request.urlopen(url + "/health", timeout=2).close()
    except (OSError, urllib.error.URLError):
        sys.exit(1)


def report(timings):
    """One line: the median over answers of tokens per second after the first token."""
    rates = [(tokens - 1) / seconds for tokens, seconds in timings if tokens > 1 and seconds > 0]
    tokens = sum(tokens for tokens, _ in timings)
    print(json.dumps({"tokens_per_second": statistics.median(rates), "answers": len(timings), "tokens": tokens}))


def answer(url, body):
    """(tokens, seconds from the first to the last of them) of one streamed answer."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    first = last = tokens = None
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in event["choices"]):
                first, last = first or now, now
    return tokens, last - first


def ask(url, prompts, count, tokens):
    with urllib.request.urlopen(url + "/v1/models", timeout=60) as reply:
        model = json.load(reply)["data"][0]["id"]
    completions = url + "/v1/chat/completions"
    bodies = [
        {"model": model, "messages": messages_of(row), "max_tokens": int(tokens), "temperature": 0}
        for row in rows(prompts)[: int(count)]
    ]
    post(completions, {**bodies[0], "max_tokens": 32})
    report([answer(completions, body) for body in bodies])


def transformers(target, prompts, count, tokens, dtype):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()

    class Clock:
        """Told of the prompt, then of every token."""

        def __init__(self):
            self.times = []

        def put(self, _):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    def generate(row, limit):
        clock = Clock()
        inputs = tokenizer.apply_chat_template(
            messages_of(row), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            model.generate(**inputs, max_new_tokens=limit, do_sample=False, streamer=clock)
        return len(clock.times) - 1, clock.times[-1] - clock.times[1]

    chosen = rows(prompts)[: int(count)]
    generate(chosen[0], 32)
    report([generate(row, int(tokens)) for row in chosen])


def table(path):
    found, taus = {}, {}
    for line in rows(path):
        level = line.get("level", "best")
        key, run = (line["engine"], line["dtype"] + ("" if level == "best" else f", {level}")), line["run"]
        speeds = found.setdefault(key, {"plain": [], "speculative": []})
        if run is None:
            continue
        if line["way"] == "both":
            taus[key[1]] = run["acceptance_length"]
            for way in speeds:
                speeds[way].append(run[way])
        else:
            speeds[line["way"]].append(run["tokens_per_second"])
    print(f"{'tokens/s after the first token':34} {'plain':>9} {'speculative':>12} {'of tau x plain':>15}")
    for (engine, dtype), speeds in found.items():
        plain, speculative = (statistics.median(of) if of else None for of in speeds.values())
        shown = [f"{speed:.0f}" if speed else "-" for speed in (plain, speculative)]
        of_plain = f"{speculative / plain / taus[dtype]:.2f}" if plain and speculative and dtype in taus else "-"
        print(f"{engine + ', ' + dtype:34} {shown[0]:>9} {shown[1]:>12} {of_plain:>15}")
    for dtype, tau in taus.items():
        print(f"tau in {dtype}, by dflash: {tau:.3f} tokens a step")


if __name__ == "__main__":
    {f.__name__: f for f in (ready, ask, transformers, table)}[sys.argv[1]](*sys.argv[2:])
