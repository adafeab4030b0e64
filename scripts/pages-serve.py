#!/usr/bin/env python3
"""Uses the chat page of a running `dflash serve` in a headless Chromium, checks it, and takes pictures.

    scripts/pages-serve.py http://127.0.0.1:8000 --out docs/figures
    scripts/pages-serve.py URL --key KEY --question "..." --question "..."

It types the questions and sends them by keyboard, side by side with and without the drafter where there is one,
and compares what the page shows with what the API says. Exits with 1 where the page is wrong, and with 77 where
there is no Chromium (CHROMIUM names one that is not in PATH). The server needs a fixed --speculate, because auto
may propose nothing where plain decoding is faster. Pictures: serve.png, wide and light, and
serve-narrow.png, 360 pixels wide and dark.
"""

import argparse
import json
import os
import pathlib
import sys
import urllib.request

import browser

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
LARGEST_PICTURE = 200_000


def check(holds, what):
    if not holds:
        raise browser.Failed(what)


def text_of(url, key, question, most):
    """The API's own greedy answer."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": most}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def give_key(page, key):
    """Types the key where the page asks for it, a wrong one first."""
    page.until("!$('key-form').hidden")
    check(page.evaluate("document.activeElement.id") == "key", "the key's field has no focus")
    page.type("wrong")
    page.press("Enter")
    page.until("$('key-trouble').textContent.includes('does not accept')")
    page.type(key)
    page.press("Enter")
    page.until("served !== null")
    check(page.evaluate("$('key-form').hidden"), "the key's form stays")
    kept = page.evaluate("[localStorage.length, document.cookie, sessionStorage.getItem('dflash-key')]")
    check(kept == [0, "", key], f"the key is kept elsewhere: {kept}")


def begin(page, url, key, width, height, dark):
    page.open(url, width, height, dark)
    if key and not page.evaluate("storage().getItem('dflash-key')"):
        give_key(page, key)
    page.until("served !== null")
    page.evaluate("$('message').focus()")


def answered(page):
    page.until("document.body.dataset.state == 'idle' && messages.length % 2 == 0 && messages.length > 0")


# The text of an answer as it can be copied: without what was rejected.
TEXT = (
    "((copy) => (copy.querySelectorAll('.rejected').forEach((one) => one.remove()), copy.textContent))"
    "(node.querySelector('.text').cloneNode(true))"
)


def shown(page):
    """What the last turn's answers show."""
    return page.evaluate(
        "[...$('turns').lastChild.querySelectorAll('.answer')].map((node) => ({name: node.ariaLabel,"
        f" text: {TEXT}, blocks: node.querySelectorAll('.block').length,"
        " drafted: node.querySelectorAll('.draft').length, fixed: node.querySelectorAll('.fix').length,"
        " figures: node.querySelector('.figures').innerText.replaceAll('\\n', ' ')}))"
    )


def ask(page, url, key, question):
    """Sends a question by keyboard in a new chat, side by side; returns what is shown."""
    page.evaluate("$('anew').click()")
    drafts = page.evaluate("served.max_draft_tokens") > 0
    if drafts:
        page.evaluate("document.querySelector('input[value=both]').click(), $('message').focus()")
    page.type(question)
    page.press("Enter")
    answered(page)
    answers = shown(page)
    expected = text_of(url, key, question, page.evaluate("$('tokens').valueAsNumber"))
    check(len(answers) == 1 + drafts, f"{len(answers)} answers")
    for answer in answers:
        check(answer["text"] == expected, f"{answer['name']} shows {answer['text']!r}, the API says {expected!r}")
        check("tokens/s" in answer["figures"], f"no speed in {answer['figures']}")
    if drafts:
        drafted, plain = answers
        check(drafted["blocks"] > 0, "no block is shown")
        check(plain["blocks"] == plain["drafted"] == 0, "the plain answer shows blocks")
        verdict = page.evaluate("document.querySelector('.verdict').innerText")
        check("the same text" in verdict, verdict)
        answers.append({"verdict": verdict.split("\n")[0]})
    said = page.evaluate("$('said').innerText")
    check("".join(expected.split()) in "".join(said.split()), f"a screen reader does not hear the answer: {said}")
    check(said.count("\n\n") < 15, "a screen reader hears too much")
    return answers


def check_keys(page):
    """Shift+Enter begins a line, Esc stops, and markup in a message is text."""
    page.evaluate("$('anew').click()")
    page.evaluate("$('tokens').value = served.max_model_len - 200, document.querySelector('input[value=plain]').click()")
    page.evaluate("$('message').focus()")
    page.type("<img src=x onerror=alert(1)>")
    page.press("Enter", shift=True)
    page.type("Tell me everything.")
    check(page.evaluate("$('message').value.split('\\n').length") == 2, "Shift+Enter begins no line")
    # A tiny target is done before anybody can look: the answer starts late.
    page.evaluate(
        "globalThis.atOnce = fetch, globalThis.fetch = (url, options) => new Promise((resolve, reject) => {"
        " options?.signal?.addEventListener('abort', () => reject(options.signal.reason));"
        " setTimeout(() => atOnce(url, options).then(resolve, reject), 30000) }), 0"
    )
    page.press("Enter")
    page.until("document.body.dataset.state == 'answering'")
    page.press("Escape")
    page.evaluate("globalThis.fetch = atOnce, 0")
    page.until("document.body.dataset.state == 'idle'", 10)
    check(page.evaluate("document.querySelectorAll('#turns img').length") == 0, "a message became markup")
    check("<img" in page.evaluate("document.querySelector('.asked').textContent"), "a message was changed")
    check(page.evaluate("document.activeElement.id") == "message", "the focus is lost")
    outline = page.evaluate("getComputedStyle($('message')).outlineStyle")
    check(outline != "none", "the focus cannot be seen")


def picture(page, path):
    size = page.screenshot(path)
    check(size < LARGEST_PICTURE, f"{path} has {size} bytes")


def narrow(page, url, key, question, out):
    begin(page, url, key, 360, 780, dark=True)
    page.evaluate("$('message').focus()")
    page.type(question)
    page.press("Enter")
    answered(page)
    wide = page.evaluate("document.documentElement.scrollWidth")
    check(wide <= 360, f"the page is {wide} pixels wide on a screen of 360")
    page.evaluate("$('message').blur(), scrollToEnd()")
    picture(page, out / "serve-narrow.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--key")
    parser.add_argument("--question", action="append")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/pages"))
    options = parser.parse_args()
    program = browser.find()
    if program is None:
        print("SKIPPED: there is no Chromium to show the page in; install chromium or set CHROMIUM", file=sys.stderr)
        return 77
    options.out.mkdir(parents=True, exist_ok=True)
    url, key, questions = options.url.rstrip("/"), options.key, options.question or [QUESTION]
    with browser.Browser(program) as page:
        try:
            begin(page, url, key, 1180, 900, dark=False)
            for question in questions:
                print(json.dumps(ask(page, url, key, question), indent=1, ensure_ascii=False))
            page.evaluate("$('message').blur(), scrollToEnd()")
            picture(page, options.out / "serve.png")
            if page.evaluate("served.max_draft_tokens") > 0:
                check_keys(page)
            narrow(page, url, key, questions[-1], options.out)
            # The wrong key's 401 is one, and it is expected.
            problems = [one for one in page.problems if not (key and "401" in one)]
            check(not problems, f"the page's console: {problems}")
        except browser.Failed as failed:
            picture_path = options.out / "failed.png"
            page.screenshot(picture_path)
            print(f"the page is wrong: {failed}\n(see {picture_path})", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
