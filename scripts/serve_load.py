"""Presses a running `dflash serve` as a crowd of chatting clients would, and checks that it holds.

    serve_load.py TARGET [--draft DRAFT] [--requests 10000] [--clients 16]

Starts the server on TARGET. A crowd asks for chats of mixed lengths, streamed and whole, and one client
in ten leaves in the middle. Checks that every other request is answered whole and that the server's
own counts agree, and prints resident memory and waiting times; exit code 1 when a bound is missed.
Standard library only.
"""

import argparse
import http.client
import json
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
    """Clients that ask until `requests` are done, and note what became of each."""

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
    sys.exit(bool(FAILURES))


if __name__ == "__main__":
    main()
