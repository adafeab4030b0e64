"""Sends prompts to a running server and compares its acceptance counters with `dflash eval --json`.

vLLM, llama.cpp and dflash count under the same names. With a command after `--`, that client sends
the prompts instead. Standard library only. Adds a line to a table; exit code 0 if the acceptance
lengths agree within the tolerance.
"""

import argparse
import json
import re
import subprocess
import sys
import urllib.request

ACCEPTED = "spec_decode_num_accepted_tokens_total"
DRAFTS = "spec_decode_num_drafts_total"
ANSWERS = "request_success_total"
# What the row layouts call the two speakers.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def messages_of(row):
    """The turns before the last answer, as `dflash eval` takes them."""
    for question in ("question", "prompt", "instruction"):
        if question in row:
            more = "\n" + row["input"] if row.get("input") else ""
            return [{"role": "user", "content": row[question] + more}]
    if "turns" in row:
        return [{"role": "user", "content": row["turns"][0]}]
    turns = [
        {"role": ROLES[turn.get("role", turn.get("from"))], "content": turn.get("content", turn.get("value"))}
        for turn in row.get("messages", row.get("conversations", []))
    ]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


def rows(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def get(url):
    with urllib.request.urlopen(url, timeout=600) as reply:
        return reply.read().decode()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def counter(metrics, name):
    """The sum of a counter over its labels."""
    lines = re.findall(rf"^(?:vllm|llamacpp):{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
    if not lines:
        sys.exit(f"interop: the server does not count {name}; is a drafter loaded?")
    return sum(map(float, lines))


def compare(name, theirs, drafts, path, tolerance, table):
    """Prints and notes an engine's acceptance length beside ours; whether they agree."""
    with open(path, encoding="utf-8") as file:
        ours = json.load(file)["acceptance_length"]
    difference = theirs / ours - 1
    agrees = abs(difference) <= tolerance
    print(f"acceptance length, {name:<28} {theirs:7.3f}   {drafts:.0f} drafts")
    print(f"acceptance length, dflash eval                  {ours:7.3f}")
    print(f"difference                                      {difference:+7.1%}   (allowed {tolerance:.0%})")
    with open(table, "a", encoding="utf-8") as file:
        verdict = "agrees" if agrees else "DISAGREES"
        file.write(f"| {name} | {theirs:.3f} | {ours:.3f} | {difference:+.1%} | {verdict} |\n")
    return agrees


def send(args):
    """Asks the server everything, one prompt after the other."""
    model = json.loads(get(args.url + "/v1/models"))["data"][0]["id"]
    prompts = [messages_of(row) for row in rows(args.prompts)[: args.count]]
    tokens = 0
    for number, messages in enumerate(prompts, 1):
        body = {"model": model, "max_tokens": args.tokens, "temperature": 0}
        if args.count_only:  # whatever is said: a chat of gpt-oss would need the vocabulary of its own format
            path, body["prompt"] = "/v1/completions", messages[-1]["content"]
        else:
            path, body["messages"] = "/v1/chat/completions", messages
        tokens += post(args.url + path, body)["usage"]["completion_tokens"]
        if number % 10 == 0 or number == len(prompts):
            print(f"interop: {number}/{len(prompts)} prompts, {tokens} tokens", file=sys.stderr)


def run(args):
    """Lets the other client ask; it must get as many answers as we would."""
    answers = lambda: counter(get(args.url + "/metrics"), ANSWERS)
    before = answers()
    if status := subprocess.run(args.client).returncode:
        sys.exit(f"interop: the client ended with {status}")
    if (got := answers() - before) != args.count:
        sys.exit(f"interop: the client got {got:.0f} answers, not {args.count}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name")
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--count-only", action="store_true", help="complete texts, print the counters, compare with nothing")
    parser.add_argument("--eval")
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--table")
    parser.add_argument("client", nargs="*")
    args = parser.parse_args()
    if not args.count_only and None in (args.name, args.eval, args.tolerance, args.table):
        parser.error("--name, --eval, --tolerance and --table, or --count-only")

    before = get(args.url + "/metrics")
    (run if args.client else send)(args)
    after = get(args.url + "/metrics")

    accepted, drafts = (counter(after, name) - counter(before, name) for name in (ACCEPTED, DRAFTS))
    theirs = 1 + accepted / drafts
    if args.count_only:
        return print(f"{theirs:.3f} over {drafts:.0f} drafts")
    sys.exit(not compare(args.name, theirs, drafts, args.eval, args.tolerance, args.table))


if __name__ == "__main__":
    main()
