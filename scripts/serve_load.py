"""Load-tests a running `dflash serve` with many chat clients.

    serve_load.py TARGET [--draft DRAFT] [--requests 10000] [--clients 16]

Starts the server on TARGET. The clients send chats of mixed lengths, streamed and whole, and one client
in ten disconnects in the middle. Checks that every other request is answered completely and that the server's
own counts agree, and prints resident memory and waiting times. Then, with the flags that a server has by
default, as many short requests that have nothing in common: the last of them must be as fast as the first,
and resident memory must have grown by what the server counts as kept. Then one request of 128 choices, behind
which others must not wait. Exit code 1 when a bound is missed. Standard library only.
"""

import argparse
import http.client
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time

from server_load import FAILURES, Server, check, resident_mib

WORDS = "how many apples does Tom have left after he gives three to each of his two friends".split()


class Crowd:
    """Clients that send requests until `requests` are done, and record each outcome."""

    def __init__(self, server, requests, clients, max_tokens):
        self.server, self.left, self.clients, self.max_tokens = server, requests, clients, max_tokens
        self.answered, self.gone, self.faults, self.tokens, self.waited = 0, 0, [], 0, []
        self.memory, self.lock, self.begun = {}, threading.Lock(), time.monotonic()

    def run(self):
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(self.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def take(self):
        with self.lock:
            self.left -= 1
            return self.left >= 0

    def note(self, seconds=None, tokens=0):
        with self.lock:
            if seconds is None:
                self.gone += 1
            else:
                self.answered += 1
                self.tokens += tokens
                self.waited.append(seconds)
            done = self.answered + self.gone
            if done % 500 == 0:
                self.memory[done] = resident_mib(self.server.process.pid)
                rate = done / (time.monotonic() - self.begun)
                print(f"     {done} requests, {self.memory[done]:.0f} MiB, {rate:.1f} requests/s", flush=True)

    def body(self, rng):
        turns = []
        for _ in range(rng.choice([1, 1, 1, 3, 5])):
            role = "user" if len(turns) % 2 == 0 else "assistant"
            turns.append({"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))})
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(1 << 30)}
        more = sampled if rng.random() < 0.5 else {"temperature": 0}
        return {"messages": turns, "max_tokens": rng.randint(1, self.max_tokens), **more}

    def client(self, seed):
        rng = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        while self.take():
            body = self.body(rng)
            leaves, streams = rng.random() < 0.1, rng.random() < 0.5
            if leaves or streams:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            if leaves:
                body["max_tokens"] = 4 * self.max_tokens
            begun = time.monotonic()
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                reply = connection.getresponse()
                if leaves:
                    reply.read(rng.randint(1, 400))
                    connection.close()
                    self.note()
                    continue
                usage = self.usage(reply, body)
                if usage["completion_tokens"] > body["max_tokens"]:
                    raise ValueError(f"{usage} for {body['max_tokens']}")
                self.note(time.monotonic() - begun, usage["completion_tokens"])
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self.faults.append(repr(error))
                connection.close()

    @staticmethod
    def usage(reply, body):
        text = reply.read().decode()
        if reply.status != 200:
            raise ValueError(f"{reply.status}: {text[:200]}")
        if "stream" not in body:
            whole = json.loads(text)
            if whole["choices"][0]["finish_reason"] not in ("stop", "length"):
                raise ValueError(text[:200])
            return whole["usage"]
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        if events[-1] != "[DONE]":
            raise ValueError(f"the stream ends with {events[-1][:100]}")
        return json.loads(events[-2])["usage"]


def counts(server):
    page = server.get("/metrics").decode()
    ended = re.findall(r'request_success_total\{[^}]*finished_reason="(\w+)"[^}]*\} (\d+)', page)
    value = lambda name: float(re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", page, re.M).group(1))
    return {reason: int(count) for reason, count in ended}, value


def complete(connection, prompt, **more):
    headers = {"Content-Type": "application/json"}
    body = {"prompt": prompt, "temperature": 0, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def first_token(port, prompt):
    """Seconds until the first token of a streamed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    begun = time.monotonic()
    reply = complete(connection, prompt, max_tokens=5, stream=True)
    first = reply.readline()
    while not first.startswith(b"data: "):
        first = reply.readline()
    seconds = time.monotonic() - begun
    reply.read()
    connection.close()
    return seconds


def cpu_seconds(pid):
    """CPU time of all threads of a process so far."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def unique(server, requests):
    """Short requests that have nothing in common, of two clients, timed in tenths by what the
    server's threads computed, on which other work of the machine has little effect."""
    before, lock, times, rng = resident_mib(server.process.pid), threading.Lock(), [], random.Random(0)
    computed = [cpu_seconds(server.process.pid)]
    prompts = [" ".join(rng.choices(WORDS, k=24)) for _ in range(requests)]

    def client():
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        while True:
            with lock:
                if not prompts:
                    return
                prompt = prompts.pop()
            begun = time.monotonic()
            reply = complete(connection, prompt, max_tokens=8)
            if reply.status != 200:
                raise ValueError(reply.read())
            reply.read()
            with lock:
                times.append(time.monotonic() - begun)
                computed.append(cpu_seconds(server.process.pid))

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tenth = max(1, requests // 10)
    # The first hundred warm up one-time allocations.
    begun = min(100, tenth // 2)
    first = (computed[tenth] - computed[begun]) / (tenth - begun)
    last = (computed[-1] - computed[-1 - tenth]) / tenth
    wall = statistics.median(times[begun:tenth]), statistics.median(times[-tenth:])
    check(len(times) == requests, f"{len(times)} unique requests answered, all of {requests}")
    check(
        last < 1.5 * first,
        f"one takes {first * 1000:.2f} ms of computing among the first {tenth}, {last * 1000:.2f} ms"
        f" among the last ({wall[0] * 1000:.1f} and {wall[1] * 1000:.1f} ms by the clock)",
    )
    value = counts(server)[1]
    kept, grown = value("dflash:prefix_cache_bytes") / 2**20, resident_mib(server.process.pid) - before
    check(grown < 1.3 * kept + 96, f"resident memory grew by {grown:.0f} MiB, of which {kept:.0f} MiB are counted as kept")


def behind(server):
    """Time to the first token of a short request, alone and behind one of 128 choices."""
    alone = statistics.median(first_token(server.port, f"one {n} two") for n in range(15))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    reply = complete(connection, "many of them", n=128, max_tokens=400, stream=True)
    reply.readline()
    while counts(server)[1]("vllm:num_requests_running") < 8:
        time.sleep(0.01)
    value = counts(server)[1]
    steps, tokens = time.monotonic(), value("vllm:generation_tokens_total")
    found = [first_token(server.port, f"three {n} four") for n in range(15)]
    value = counts(server)[1]
    tokens = value("vllm:generation_tokens_total") - tokens
    # Eight sequences produce at least one token each per step.
    step = 8 * (time.monotonic() - steps) / tokens
    waiting, median = value("vllm:num_requests_waiting"), statistics.median(found)
    connection.close()
    while counts(server)[1]("vllm:num_requests_running") > 0:
        time.sleep(0.01)
    # Other load may have started meanwhile.
    again = statistics.median(first_token(server.port, f"five {n} six") for n in range(15))
    alone = max(alone, again)
    check(waiting > 20, f"{waiting:.0f} of its choices still wait")
    check(median < 3 * alone + step, f"first token after {alone * 1000:.1f} ms alone, {median * 1000:.1f} ms (at most {max(found) * 1000:.1f}) behind 128 choices, a step {step * 1000:.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        drafted = ["--draft", args.draft] if args.draft else []
        flags = ["serve", "--target", args.target, *drafted, "--prefix-cache-mib", "64"]
        server = Server(flags, directory)
        crowd = Crowd(server, args.requests, args.clients, args.max_tokens)
        crowd.run()
        seconds = time.monotonic() - crowd.begun
        waited = sorted(crowd.waited)
        middle, late = statistics.median(waited), waited[int(0.99 * len(waited))]
        print(f"     {args.requests} requests of {args.clients} clients in {seconds:.0f} s, {crowd.gone} left early")
        print(f"     {crowd.tokens / seconds:.0f} tokens/s; a request takes {middle * 1000:.0f} ms (median), {late * 1000:.0f} ms (p99)")
        check(not crowd.faults, f"{len(crowd.faults)} requests failed {crowd.faults[:3]}")
        check(crowd.answered + crowd.gone == args.requests, f"{crowd.answered} answered and {crowd.gone} left: all of {args.requests}")
        for _ in range(100):
            ended, value = counts(server)
            if value("vllm:num_requests_running") + value("vllm:num_requests_waiting") == 0:
                break
            time.sleep(0.1)
        check(value("vllm:num_requests_running") == 0, "nothing runs at the end")
        whole = ended["stop"] + ended["length"]
        check(crowd.answered <= whole <= args.requests, f"the server counts {whole} whole answers and {ended['abort']} aborted ones")
        if args.draft:
            drafts = value("vllm:spec_decode_num_drafts_total")
            accepted = value("vllm:spec_decode_num_accepted_tokens_total")
            print(f"     acceptance length {1 + accepted / drafts:.2f} over {drafts:.0f} blocks")
        if len(crowd.memory) > 2:
            marks = sorted(crowd.memory)
            first, last = crowd.memory[marks[len(marks) // 5]], crowd.memory[marks[-1]]
            check(last < 1.1 * first, f"memory after {marks[len(marks) // 5]} requests {first:.0f} MiB, at the end {last:.0f} MiB")
        check(server.process.poll() is None, "the server lives")
        check(server.end() == 0, "and ends in order")
        server = Server(["serve", "--target", args.target, *drafted], directory)
        behind(server)
        unique(server, args.requests)
        check(server.end() == 0, "the second server ends in order")
    sys.exit(bool(FAILURES))


if __name__ == "__main__":
    main()
