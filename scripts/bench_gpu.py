#!/usr/bin/env python3
"""Measure what can only be measured on a GPU, from a bundle that needs no toolchain and no network.

usage: bench_gpu.py pack BUNDLE                   in the source tree, after `make build`
       bench_gpu.py run BUNDLE [STAGE...] [--device cuda] [--out FILE] [--scratch DIR] [--small]

A bundle holds the programs, the tests that run on any device, the reference vectors and these scripts. With
PEER_PYTHON=PYTHON, an interpreter that has speculators, also its versions of that and of what it needs beside torch, made
for the Python of the GPU's machine (PEER_VERSION, 3.12) by pip. Stages, all by default:

  machine   what the doctor finds, and the driver
  step      `dflash bench train-step` at the shapes of three targets, beside `dflash plan`'s budget and the peer's step; each
            product by itself, and the budget that follows from these (`dflash plan --measured`)
  tiny      300 steps on a tiny target: losses on the device against the CPU's, the rate in bfloat16, what a line of the log costs,
            and decoding with that draft
  line      a target of Qwen3-8B's shape with random weights: what a server delivers of documents of 8,192 tokens and of 512,
            trainer, trainer and target in one process, and eval
  parity    every reference vector, random attention and the leak test, in float32 and bfloat16

Figures go to the JSON of results (--out) as they come, also when a stage fails or is killed, and stay there when other stages
run later; the exit status says whether one failed. Stages write to a scratch directory, `line` about 35 GB: one of TMPDIR that
goes in the end, or --scratch, which stays and spares the next call what the last one made. --small takes small shapes: the
rehearsal on a CPU.
"""
import argparse, concurrent.futures, contextlib, json, os, pathlib, random, re, shutil, signal, statistics, subprocess, sys, tempfile, time
import urllib.request, zlib

HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = ["dflash", "dflash-engine"]
# Package and test binary; all but the last take their kind of numbers from a variable, an optimizer's state is float32.
TESTS = {"parity-target": ("dflash-target", "parity"), "parity-draft": ("dflash-draft", "parity"), "attention": ("dflash-draft", "attention"),
         "optimizer": ("dflash-train", "golden")}
# Of what the peer needs, the packages that are large or torch's own: the Python of the GPU's machine must have them.
LEFT_OUT = ("torch", "triton", "numpy", "pandas", "pyarrow", "nvidia-", "cuda-", "setuptools", "pip")
# Run by PEER_PYTHON: speculators and all that it asks for, as name==version.
CLOSURE = """
from importlib.metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement
found, open_ = {}, ["speculators"]
while open_:
    name = open_.pop().lower().replace("_", "-")
    if name not in found and not name.startswith(%r):
        try:
            it = distribution(name)
        except PackageNotFoundError:
            continue  # the peer does without it there
        found[name] = it.version
        wanted = map(Requirement, it.requires or [])
        open_ += [need.name for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
print(*(f"{name}=={version}" for name, version in sorted(found.items())))
""" % (LEFT_OUT,)

QWEN3_8B = {}
QWEN3_32B = dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64)
# The dimensions of gpt-oss-120b under Qwen3's name: a step needs nothing else of a target.
GPT_OSS_120B = dict(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_attention_heads=64, head_dim=64)
SMALL = dict(vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
# Name: target, tokens, anchors, documents. 5 layers, 5 auxiliary layers, blocks of 16.
SHAPES = {"qwen3-8b": (QWEN3_8B, 8192, 512, 4), "qwen3-8b-dense": (QWEN3_8B, 8192, 3072, 4), "qwen3-32b": (QWEN3_32B, 8192, 512, 4),
          "gpt-oss-120b": (GPT_OSS_120B, 8192, 512, 4), "qwen3-8b-one-document": (QWEN3_8B, 8192, 512, 1)}
SMALL_SHAPES = {"small": (SMALL, 256, 32, 2), "small-dense": (SMALL, 256, 96, 2), "small-one-document": (SMALL, 256, 32, 1)}
# Relative difference of two losses: of one of the first 20 steps, and of the mean of the last 50. Later single steps part,
# since each rounding is carried on.
FIRST_STEPS, FIRST_BOUND, LAST_STEPS, LAST_BOUND = 20, 1e-3, 50, 2e-2
# Time limit of a test binary on a device; dry runs on a CPU are slower.
PARITY_SECONDS = int(os.environ.get("PARITY_SECONDS", 300))


class Failed(Exception):
    pass


def pack(bundle):
    bundle = pathlib.Path(bundle)
    root = HERE.parent
    shutil.rmtree(bundle, ignore_errors=True)
    for folder in ("bin", "tests", "scripts"):
        (bundle / folder).mkdir(parents=True)
    for program in PROGRAMS:
        strip(root / "target/release" / program, bundle / "bin" / program)
    for name, path in test_binaries(root).items():
        strip(path, bundle / "tests" / name)
    vectors = shutil.ignore_patterns("*.rs", "Cargo.toml")
    shutil.copytree(root / "tests/golden", bundle / "golden", ignore=vectors)
    for script in ("bench_gpu.py", "random_target.py"):
        shutil.copy(HERE / script, bundle / "scripts" / script)
    peer = pack_peer(root, bundle)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True).stdout.strip()
    (bundle / "bundle.json").write_text(json.dumps(dict(commit=commit, peer=peer)))
    packed = bundle.with_name(f"{bundle.name}.tar.xz")
    subprocess.run(["tar", "-C", bundle.parent, "-cf", packed, "--use-compress-program=xz -T0 -3", bundle.name], check=True)
    print(f"{bundle}, and {packed} to carry: {packed.stat().st_size / 2**20:.0f} MiB{', with the peer' if peer else ''}")


def strip(source, target):
    subprocess.run(["strip", "-o", target, source], check=True)


def test_binaries(root):
    "Builds the tests; their paths by name."
    names = [flag for name in sorted({test for _, test in TESTS.values()}) for flag in ("--test", name)]
    command = ["cargo", "test", "--release", "--workspace", "--no-run", "--message-format=json", *names]
    environment = {key: value for key, value in os.environ.items() if key != "LIBTORCH"}
    built = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    found = {(pathlib.Path(it["manifest_path"]).parent.name, it["target"]["name"]): it["executable"]
             for it in messages if it.get("executable")}
    return {name: found[key] for name, key in TESTS.items()}


def pack_peer(root, bundle):
    "The peer's packages, where an interpreter has them."
    python = os.environ.get("PEER_PYTHON")
    script = pathlib.Path(os.environ.get("PEER_SCRIPT", root / "scripts/engines/speculators_step.py"))
    if not python:
        return None
    if not script.is_file():
        raise Failed(f"PEER_SCRIPT={script} is not there")
    found = subprocess.run([python, "-c", CLOSURE], capture_output=True, text=True)
    if found.returncode != 0:
        raise Failed(f"PEER_PYTHON={python} has no speculators: {found.stderr.splitlines()[-1:]}")
    packages = found.stdout.split()
    version = os.environ.get("PEER_VERSION", "3.12")
    # Compiled packages fit only one version of Python.
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--target", bundle / "peer", "--python-version", version, "--only-binary", ":all:",
                    "--no-deps", "--no-compile", *packages], check=True)
    shutil.copy(script, bundle / "scripts" / "peer_step.py")
    return dict(python=version, packages=packages)


class Bench:
    def __init__(self, bundle, device, small, scratch):
        self.bundle, self.device, self.small, self.scratch = bundle.resolve(), device, small, scratch
        self.dflash = self.bundle / "bin" / "dflash"
        self.note = lambda figures: None

    # Shared by the stages.

    def say(self, command, timeout=600, env=None, cwd=None):
        "Runs a command to its end; its standard output."
        command = [str(part) for part in command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | (env or {}), cwd=cwd or self.scratch)
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
        return done.stdout

    def ours(self, *arguments, timeout=600):
        return self.say([self.dflash, "--quiet", *arguments], timeout)

    def doctor(self):
        # It exits with 1 if something is missing, which the findings name.
        done = subprocess.run([self.dflash, "doctor", "--json", "--offline"], capture_output=True, text=True, cwd=self.scratch)
        return {it["what"]: it["found"] for it in json.loads(done.stdout)}

    def target(self, shape, full=False):
        "A directory with a target of random weights."
        pairs = [f"{name}={json.dumps(value)}" for name, value in shape.items()]
        where = self.scratch / f"target-{zlib.crc32(' '.join([*pairs, str(full)]).encode()):08x}"
        if not where.exists():
            aside = where.with_suffix(".part")
            shutil.rmtree(aside, ignore_errors=True)
            self.say([sys.executable, self.bundle / "scripts" / "random_target.py", aside, *(["--full"] if full else []), *pairs])
            aside.rename(where)
        return where

    def demo(self):
        "The demo's corpus, prompts and tiny trained target, and a dataset of it."
        where, aside = self.scratch / "demo", self.scratch / "demo.part"
        if not where.exists():
            shutil.rmtree(aside, ignore_errors=True)
            rows = ["--rows", 300, "--held-out", 8, "--steps", 20] if self.small else ["--rows", 3000, "--held-out", 32]
            self.ours("demo-target", "--output", aside, *rows)
            aside.rename(where)
        return where

    def prepare(self, target, length):
        data = target.parent / f"data-{target.name}"
        if not data.exists():
            self.ours("prepare", "--target", target, "--data", self.demo() / "conversations.jsonl", "--output", data, "--seq-length", length)
        return data

    @contextlib.contextmanager
    def server(self, target, *flags):
        "A hidden-state server; its address."
        port, log = self.scratch / "port", self.scratch / "server.log"
        port.unlink(missing_ok=True)
        with open(log, "w") as to:
            process = subprocess.Popen([str(part) for part in (self.dflash, "hidden-server", "--target", target, "--device", self.device, "--port", 0,
                                        "--port-file", port, *flags)], stdout=to, stderr=to, cwd=self.scratch)
        try:
            begun = time.monotonic()
            while not (port.exists() and port.read_text().strip()):
                if process.poll() is not None or time.monotonic() - begun > 300:
                    raise Failed(f"the server did not start:\n{log.read_text()[-1500:]}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port.read_text().strip()}/v1"
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()

    def train(self, name, target, endpoint, device, *flags):
        "A run; its metric lines."
        out = self.scratch / name
        shutil.rmtree(out, ignore_errors=True)
        source = ["--vllm-endpoint", endpoint] if endpoint else ["--colocate"]
        self.ours("train", "--target", target, "--data-path", self.prepare(target, 2048), *source, "--save-path", out,
                  "--device", device, "--no-epoch-checkpoints", "--validation-ratio", 0, *flags)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def delivered(self, endpoint, length):
        "What a server delivers of documents of so many tokens to eight clients at once, after one that it warms up with."
        base = endpoint.removesuffix("/v1")
        vocabulary = json.load(urllib.request.urlopen(f"{base}/v1/models", timeout=60))["data"][0]["metadata"]["vocab_size"]
        draw = random.Random(length)

        def ask(_=None):
            body = json.dumps(dict(input_ids=[draw.randrange(vocabulary) for _ in range(length)])).encode()
            request = urllib.request.Request(f"{base}/v1/hidden_states", body, {"Content-Type": "application/json"})
            return len(urllib.request.urlopen(request, timeout=300).read())

        def busy():
            text = urllib.request.urlopen(f"{base}/metrics", timeout=60).read().decode()
            return float(re.search(r"^dflash_hidden_server_busy_seconds_total (\S+)$", text, re.M)[1])

        ask()
        documents = 8 if self.small else max(8, 131072 // length)
        before, begun = busy(), time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            size = sum(clients.map(ask, range(documents)))
        seconds, passes = time.monotonic() - begun, busy() - before
        return dict(documents=documents, mb_per_s=size / seconds / 1e6, tokens_per_s=documents * length / seconds, seconds=seconds, seconds_in_passes=passes)

    # The stages: each returns its figures, or raises Failed with the figures that show why.

    def machine(self):
        found = self.doctor()
        with contextlib.suppress(OSError):
            query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
            found["nvidia-smi"] = self.say(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]).strip()
        return found

    def parity(self):
        libtorch = re.search(r" at (.*?)(?: \(|$)", self.doctor()["libtorch"])
        if not libtorch:
            raise Failed(f"no libtorch: {self.doctor()['libtorch']}")
        figures, failures = {}, []
        for kind in ("float32", "bfloat16"):
            for name in TESTS:
                if (kind, name) == ("bfloat16", "optimizer"):
                    continue
                place = dict(DFLASH_TEST_DEVICE=self.device, DFLASH_TEST_DTYPE=kind, DFLASH_GOLDEN_OWN=str(self.bundle / "golden"),
                             LD_LIBRARY_PATH=f"{libtorch[1]}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}")
                try:
                    done = subprocess.run([self.bundle / "tests" / name], capture_output=True, text=True, env=os.environ | place, cwd=self.scratch,
                                          timeout=PARITY_SECONDS)
                except subprocess.TimeoutExpired as error:
                    figures[f"{name} {kind}"] = dict(seconds=PARITY_SECONDS, finished=False)
                    failures.append(f"{name} in {kind}: not done after {PARITY_SECONDS} s:\n" + (error.stdout or b"").decode(errors="replace")[-2000:])
                    self.note(figures)
                    continue
                counts = re.search(r"(\d+) passed; (\d+) failed", done.stdout)
                figures[f"{name} {kind}"] = dict(passed=int(counts[1]), failed=int(counts[2])) if counts else dict(status=done.returncode)
                if done.returncode != 0 or not counts:
                    failed = "\n".join(re.findall(r"^test .* FAILED$|^.*panicked at.*\n.*", done.stdout + done.stderr, re.M))
                    failures.append(f"{name} in {kind}:\n" + (failed + "\n" + (done.stdout + done.stderr)[-1000:])[:6000])
                self.note(figures)
        if failures:
            raise Failed("\n".join(failures), figures)
        return figures

    def tiny(self):
        steps = 40 if self.small else 300
        target = self.demo() / "target"
        shape = ["--num-layers", 4, "--block-size", 8, "--target-layer-ids", 2, 3, 5, 6, "--total-seq-len", 2048, "--max-anchors", 64 if self.small else 256,
                 "--anchors-per-sequence", 256, "--max-steps", steps, "--seed", 1]
        with self.server(target, "--dtype", "float32", "--wire-dtype", "f32", "--target-layer-ids", 2, 3, 5, 6) as endpoint:
            runs = {name: self.train(name, target, endpoint, device, "--compute-dtype", kind, "--log-every", 1, *shape)
                    for name, device, kind in (("cpu", "cpu", "float32"), ("device", self.device, "float32"), ("device-bf16", self.device, "bfloat16"))}
            # The cost of a log line, which waits for the device.
            runs["device-bf16-few-lines"] = self.train("few-lines", target, endpoint, self.device, "--compute-dtype", "bfloat16", "--log-every", steps // 4, *shape)
        rates = {name: statistics.median(line["slots_per_s"] for line in lines[1:]) for name, lines in runs.items()}
        step_ms = {name: 1e3 * statistics.median(line["interval_s"] / line["steps"] for line in lines[1:]) for name, lines in runs.items()}
        del runs["device-bf16-few-lines"]
        losses = {name: [line["loss"] for line in lines] for name, lines in runs.items()}
        mean = lambda name: statistics.fmean(losses[name][-LAST_STEPS:])
        apart = lambda a, b: abs(a - b) / abs(b)
        figures = dict(
            steps=steps, first_steps_apart=max(map(apart, losses["device"][:FIRST_STEPS], losses["cpu"][:FIRST_STEPS])),
            last_steps_apart=apart(mean("device"), mean("cpu")), last_steps_apart_bf16=apart(mean("device-bf16"), mean("cpu")),
            loss={name: mean(name) for name in losses}, slots_per_s=rates, step_ms=step_ms,
            log_line_ms=step_ms["device-bf16"] - step_ms["device-bf16-few-lines"])
        self.note(figures)
        figures["decode"] = json.loads(self.ours("bench", "decode", "--target", target, "--draft", self.scratch / "device-bf16", "--prompts", self.demo() / "prompts.jsonl",
                                                 "--limit", 2 if self.small else 16, "--max-new-tokens", 128, "--device", self.device, "--json").strip().splitlines()[-1])
        if any(len(found) != steps for found in losses.values()):
            raise Failed(f"{ {name: len(found) for name, found in losses.items()} } lines of {steps} steps", figures)
        if not (figures["first_steps_apart"] <= FIRST_BOUND and figures["last_steps_apart"] <= LAST_BOUND and figures["last_steps_apart_bf16"] <= LAST_BOUND):
            raise Failed(f"losses are further apart than {FIRST_BOUND} at first or {LAST_BOUND} at last", figures)
        return figures

    def step(self):
        figures, failures = {}, []
        steps = 2 if self.small else 5
        for name, (shape, tokens, anchors, docs) in (SMALL_SHAPES if self.small else SHAPES).items():
            target = self.target(shape)
            flags = ["--tokens", tokens, "--anchors", anchors, "--docs", docs, "--block", 16, "--layers", 5, "--aux-layers", 5, "--steps", steps, "--device", self.device]
            sides = dict(ours=lambda: self.ours("bench", "train-step", "--target", target, *flags, "--products", "--json"))
            if (self.bundle / "peer").is_dir():
                sides["peer"] = lambda: self.say([sys.executable, self.bundle / "scripts" / "peer_step.py", target, *flags], env=dict(PYTHONPATH=str(self.bundle / "peer")))
            figures[name] = dict(computed=self.computed(target, tokens, anchors, docs))
            for side, run in sides.items():
                try:
                    figures[name][side] = json.loads(run().strip().splitlines()[-1])
                except (Failed, subprocess.TimeoutExpired, ValueError) as error:
                    figures[name][side] = str(error)
                    # The peer's limitations are not our failures.
                    failures += [f"{name}: {error}"] if side == "ours" else []
            if isinstance(figures[name]["ours"], dict):
                figures[name]["times_as_long_as_computed"] = figures[name]["ours"]["step_ms"] / figures[name]["computed"]["step_ms"]
                # A CPU's dry-run figures are not a GPU's.
                if self.device != "cpu":
                    measured = self.scratch / f"measured-{name}.json"
                    measured.write_text(json.dumps(figures[name]["ours"]["measured"]))
                    figures[name]["computed_by_measured"] = self.computed(target, tokens, anchors, docs, "--measured", measured)
            if all(isinstance(figures[name].get(side), dict) for side in ("ours", "peer")):
                figures[name]["times_as_fast"] = figures[name]["peer"]["step_ms"] / figures[name]["ours"]["step_ms"]
            self.note(figures)
        if failures:
            raise Failed("\n".join(failures), figures)
        return figures

    def computed(self, target, tokens, anchors, docs, *flags):
        "What `dflash plan` computes for such a step on this GPU; in a rehearsal, on an H200."
        gpu = self.gpu()
        rows = ["--rows", 64 * docs, "--mean-length", tokens // docs, "--total-seq-len", tokens, "--max-anchors", anchors, "--anchors-per-sequence", -(-anchors // docs)]
        plan = json.loads(self.ours("plan", "--device", gpu, "--target", target, *rows, "--num-layers", 5, "--block-size", 16, "--json", *flags))
        return dict(gpu=gpu) | {key: plan["budget"][key] for key in ("step_ms", "slow", "mfu", "launches", "launches_beyond_products", "waits", "peak_bytes", "parts")}

    def gpu(self):
        "The name by which `plan` knows this GPU."
        if self.device == "cpu":
            return "h200"
        found = self.say(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).lower()
        known = [name for name in ("h200", "h100", "b200", "a100", "4090") if name in found]
        if not known:
            raise Failed(f"`dflash plan` has no figures for {found.strip()}")
        return known[0]

    def line(self):
        demo, shape = self.demo(), SMALL if self.small else QWEN3_8B
        target = self.target(shape, full=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"):
            if (demo / "target" / name).is_file():
                shutil.copy(demo / "target" / name, target / name)
        ids = ["2", "3", "4"] if self.small else ["2", "10", "18", "26", "34"]
        figures, steps = {}, 4 if self.small else 20
        flags = ["--target-layer-ids", *ids, "--total-seq-len", 512 if self.small else 8192, "--max-anchors", 32 if self.small else 512, "--max-steps", steps,
                 "--num-layers", 2 if self.small else 5, "--mask-token-id", 1000, "--log-every", 2 if self.small else 5]
        told = ("loss", "slots_per_s", "tokens_per_s", "tflops", "mfu", "peak_memory_mib", "data_wait_share", "stream")
        with self.server(target, "--target-layer-ids", *ids) as endpoint:
            figures["server"] = {f"{length} tokens": self.delivered(endpoint, length) for length in ((512, 64) if self.small else (8192, 512))}
            self.note(figures)
            lines = self.train("line", target, endpoint, self.device, *flags)
        figures["train"] = {key: lines[-1].get(key) for key in told}
        self.note(figures)
        together = self.train("line-together", target, None, self.device, *flags)
        figures["train_colocated"] = {key: together[-1].get(key) for key in told}
        self.note(figures)
        report = self.scratch / "eval.json"
        self.ours("eval", "--target", target, "--draft", self.scratch / "line", "--prompts", demo / "prompts.jsonl", "--limit", 2 if self.small else 8,
                  "--max-new-tokens", 32, "--device", self.device, "--json", report)
        found = json.loads(report.read_text())
        figures["eval"] = {key: found[key] for key in ("responses", "tokens", "acceptance_length", "tokens_per_second", "lossless", "memory", "device")}
        if lines[-1]["step"] != steps:
            raise Failed(f"the last metric line is of step {lines[-1]['step']}, not of {steps}", figures)
        return figures


STAGES = [Bench.machine, Bench.step, Bench.tiny, Bench.line, Bench.parity]


@contextlib.contextmanager
def scratch_directory(named):
    if named:
        named.mkdir(parents=True, exist_ok=True)
        yield named.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="dflash-bench-gpu-") as scratch:
            yield pathlib.Path(scratch)


def run(bundle, names, device, out, small, scratch):
    known = {stage.__name__: stage for stage in STAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"bench_gpu.py: no stage {unknown[0]}; there are {', '.join(known)}")
    if not (bundle / "bundle.json").is_file():
        sys.exit(f"bench_gpu.py: {bundle} is not a whole bundle; `bench_gpu.py pack {bundle}` makes one in the source tree")
    results = dict(json.loads((bundle / "bundle.json").read_text()), device=device, small=small, stages={})
    if out.exists():
        results["stages"] = json.loads(out.read_text())["stages"]
    failed = 0

    def keep(name, result, begun):
        result["seconds"] = round(time.monotonic() - begun, 1)
        results["stages"][name] = result
        whole = out.with_suffix(".part")
        whole.write_text(json.dumps(results, indent=1))
        whole.replace(out)

    with scratch_directory(scratch) as scratch:
        bench = Bench(bundle, device, small, scratch)
        for name in names or known:
            begun, result = time.monotonic(), {}
            bench.note = lambda figures: keep(name, dict(ok=False, error="it did not come to its end", figures=figures), begun)
            try:
                result = dict(ok=True, figures=known[name](bench))
            except (Failed, subprocess.TimeoutExpired, OSError, KeyError, ValueError) as error:
                message, *figures = error.args if isinstance(error, Failed) else [f"{type(error).__name__}: {error}"]
                result = dict(ok=False, error=message, figures=figures[0] if figures else {})
                failed += 1
            keep(name, result, begun)
            print(f"{name:<8} {'ok' if result['ok'] else 'FAILED'}  {result['seconds']} s")
            print(json.dumps(result.get("error") or result["figures"], indent=1)[:4000].replace("\\n", "\n"), flush=True)
    print(out)
    return 1 if failed else 0


def main():
    if len(sys.argv) >= 3 and sys.argv[1] == "pack":
        return pack(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["pack", "run"])
    parser.add_argument("bundle", type=pathlib.Path)
    parser.add_argument("stages", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-gpu.json"))
    parser.add_argument("--scratch", type=pathlib.Path)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    return run(arguments.bundle, arguments.stages, arguments.device, arguments.out, arguments.small, arguments.scratch)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"bench_gpu.py: {error}")
