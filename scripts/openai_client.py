"""The checks of scripts/openai_client.sh on a running server: openai_client.py URL KEY LOG."""

import concurrent.futures
import shutil
import subprocess
import sys
import urllib.request

import openai
from prometheus_client.parser import text_string_to_metric_families

URL, KEY, LOG = sys.argv[1:]
SECRET = "the purple walrus hides seventeen umbrellas"


def check(holds, text):
    print(f"{'ok  ' if holds else 'FAIL'} {text}", flush=True)
    if not holds:
        sys.exit(1)


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    check(False, f"{kind.__name__} is raised")


def main():
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    check(model == "served", "models.list")
    question = [{"role": "user", "content": f"{SECRET}. How many are 3 and 4?"}]
    ask = lambda **more: client.chat.completions.create(model=model, messages=question, max_tokens=24, **more)

    whole = ask(temperature=0)
    text = whole.choices[0].message.content
    check(text and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens,
          f"chat.completions: {whole.usage.completion_tokens} tokens")
    chunks = list(ask(temperature=0, stream=True, stream_options={"include_usage": True}))
    pieces = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(pieces == text, "a stream is the whole reply in pieces")
    check(chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, "and ends with the usage")
    check(ask(temperature=0, extra_body={"speculative": False}).choices[0].message.content == text, "without the draft it is the same text")

    several = ask(n=3, seed=7, temperature=1.0, logprobs=True, top_logprobs=4)
    check(len(several.choices) == 3, "n=3 gives three choices")
    again = ask(n=3, seed=7, temperature=1.0)
    check([c.message.content for c in again.choices] == [c.message.content for c in several.choices], "a seed repeats them")
    tops = [[top.logprob for top in entry.top_logprobs] for entry in several.choices[0].logprobs.content]
    check(all(len(top) == 4 and top == sorted(top, reverse=True) for top in tops), "four top_logprobs, best first")

    stop = text[len(text) // 2:][:3]
    cut = ask(temperature=0, stop=[stop]).choices[0]
    check(cut.message.content == text[:text.index(stop)] and cut.finish_reason == "stop", f"stop={stop!r}")
    plain = client.completions.create(model=model, prompt="Tom has", max_tokens=8, temperature=0, logprobs=2)
    check(len(plain.choices[0].logprobs.tokens) == plain.usage.completion_tokens, "completions, with logprobs")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: ask(temperature=0).choices[0].message.content, range(16)))
    check(set(texts) == {text}, "16 at a time say the same")

    error = refused(openai.AuthenticationError, lambda: openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0).models.list())
    check(error.status_code == 401, "401 for a wrong key")
    error = refused(openai.BadRequestError, lambda: ask(presence_penalty=2.5))
    check(error.param == "presence_penalty", "400 names what is out of range")
    error = refused(openai.BadRequestError, lambda: ask(extra_body={"bogus": 1}))
    check(error.param == "bogus", "400 names what is unknown")
    error = refused(openai.BadRequestError, lambda: client.completions.create(model=model, prompt=[1] * 100_000))
    check(error.code == "context_length_exceeded", "400 for a prompt that is too long")
    error = refused(openai.NotFoundError, lambda: client.chat.completions.create(model="other", messages=question))
    check(error.param == "model", "404 for another model")

    stream = ask(temperature=1.0, stream=True)
    next(iter(stream))
    stream.close()
    page = urllib.request.urlopen(f"{URL}/metrics").read().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name in ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds"):
        check(name in families, f"/metrics has {name}")
    promtool(page)
    with open(LOG, encoding="utf-8", errors="replace") as log:
        lines = log.read()
    check(SECRET not in lines and text not in lines and KEY not in lines, f"no prompt, answer or key in {len(lines.splitlines())} lines of log")


def promtool(page):
    if not (path := shutil.which("promtool")):
        return print("     promtool is not installed; Prometheus' parser has read the page")
    found = subprocess.run([path, "check", "metrics"], input=page, text=True, capture_output=True)
    # vLLM's names have a colon, which promtool advises against; a page that it cannot read is 1.
    advice = [line for line in found.stderr.splitlines() if "should not contain ':'" not in line]
    check(found.returncode in (0, 3) and not advice, f"promtool reads the page {advice[:3]}")


if __name__ == "__main__":
    main()
