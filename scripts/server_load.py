"""Load-tests a running hidden-state server with many clients, some of them hostile.

    server_load.py TARGET [--requests 10000] [--clients 16]

Starts `dflash hidden-server` on TARGET. The clients send prompts of mixed lengths, and one in ten
disconnects before its reply; then come 300 incomplete requests and 40 slow uploads. Prints resident memory,
waiting times and how quickly /health answers meanwhile; exit code 1 if a bound is exceeded. Standard
library only.
"""

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PROGRAM = os.environ.get("DFLASH", "target/release/dflash")
FAILURES = []


def check(holds, text):
    print(f"{'ok  ' if holds else 'FAIL'} {text}", flush=True)
    if not holds:
        FAILURES.append(text)


def resident_mib(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


class Server:
    """A server that takes requests; `arguments` begin with its command."""

    def __init__(self, arguments, directory):
        port_file = os.path.join(directory, "port")
        if os.path.exists(port_file):
            os.remove(port_file)
        self.log = open(os.path.join(directory, "server.log"), "wb")
        command = [PROGRAM, *arguments, "--port", "0", "--port-file", port_file]
        self.process = subprocess.Popen(command, stderr=self.log)
        for _ in range(1200):
            if os.path.exists(port_file):
                break
            if self.process.poll() is not None:
                sys.exit(f"server_load: the server ended; see {self.log.name}")
            time.sleep(0.1)
        with open(port_file, encoding="ascii") as file:
            self.port = int(file.read())

    def get(self, path, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request("GET", path)
        body = connection.getresponse().read()
        connection.close()
        return body

    def memory(self):
        return resident_mib(self.process.pid)

    def health_seconds(self):
        begun = time.monotonic()
        self.get("/health")
        return time.monotonic() - begun

    def end(self):
        self.process.terminate()
        return self.process.wait(60)


class Crowd:
    """Clients that ask until `requests` are done, and note how long each took."""

    def __init__(self, server, requests, clients):
        self.server, self.left, self.clients = server, requests, clients
        self.total, self.done, self.waited, self.gone, self.faults = requests, 0, [], 0, []
        self.vocabulary = json.loads(server.get("/v1/models"))["data"][0]["metadata"]["vocab_size"]
        self.memory = {}
        self.lock = threading.Lock()

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

    def note(self, seconds):
        with self.lock:
            self.done += 1
            if seconds is None:
                self.gone += 1
            else:
                self.waited.append(seconds)
            if self.done % 1000 == 0:
                self.memory[self.done] = self.server.memory()
                print(f"     {self.done} requests, {self.memory[self.done]:.0f} MiB", flush=True)

    def client(self, seed):
        rng = random.Random(seed)
        connection = None
        while self.take():
            tokens = [rng.randrange(self.vocabulary) for _ in range(rng.randint(1, 100))]
            leaves = rng.random() < 0.1
            begun = time.monotonic()
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/hidden_states", json.dumps({"input_ids": tokens}), headers)
                if leaves:
                    connection.close()
                    connection = None
                    self.note(None)
                    continue
                reply = connection.getresponse()
                body = reply.read()
                if reply.status != 200:
                    self.faults.append((reply.status, body[:200]))
                self.note(time.monotonic() - begun)
            except OSError as error:
                self.faults.append(error)
                connection = None
                self.note(None)


def half_heads(server, count=300):
    sockets = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(b"POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        sockets.append(client)
    slowest = max(server.health_seconds() for _ in range(5))
    check(slowest < 5, f"/health beside {count} half heads: {slowest * 1000:.0f} ms at most")
    for client in sockets:
        client.close()


def slow_uploads(server, count=40, size=30 << 20):
    before = server.memory()
    sockets, part = [], b"[" + b"1," * (1 << 18)
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", server.port))
        client.settimeout(2)
        head = f"POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        try:
            client.sendall(head.encode() + part)
        except OSError:
            pass
        sockets.append(client)
    time.sleep(1)
    slowest = max(server.health_seconds() for _ in range(5))
    grown = server.memory() - before
    check(grown < 200, f"{count} slow uploads of {size >> 20} MiB: {grown:.0f} MiB more")
    check(slowest < 5, f"/health beside them: {slowest * 1000:.0f} ms at most")
    for client in sockets:
        client.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = Server(["hidden-server", args.target], directory)
        crowd = Crowd(server, args.requests, args.clients)
        begun = time.monotonic()
        crowd.run()
        seconds = time.monotonic() - begun
        waited = sorted(crowd.waited)
        middle, late = statistics.median(waited), waited[int(0.99 * len(waited))]
        print(f"     {crowd.done} requests of {args.clients} clients in {seconds:.0f} s, {crowd.gone} left early")
        print(f"     from request to reply: median {middle * 1000:.0f} ms, p99 {late * 1000:.0f} ms")
        check(not crowd.faults, f"{len(crowd.faults)} requests failed {crowd.faults[:3]}")
        if len(crowd.memory) > 1:
            first, last = crowd.memory[1000], crowd.memory[max(crowd.memory)]
            check(last < 1.15 * first, f"memory after 1,000 requests {first:.0f} MiB, at the end {last:.0f} MiB")
        half_heads(server)
        slow_uploads(server)
        check(server.process.poll() is None, "the server lives")
        check(server.end() == 0, "and ends in order")
    sys.exit(bool(FAILURES))


if __name__ == "__main__":
    main()
