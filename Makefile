# The commands for developers; `make help` lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build demo test soak hostile lint check pages bench bench-gpu interop recipes wheel archive install-test book clean

# One profile for programs and tests: libtorch's bindings take minutes to build, and numerical tests are ten
# times as fast when optimised.
CARGO_FLAGS ?= --release
# Cargo's own commands use .deps/libtorch (.cargo/config.toml); only `make setup` reads the user's
# variable.
CARGO := env -u LIBTORCH cargo

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## check the tools and set up libtorch
	@scripts/setup.sh

# The whole workspace, as for the tests: single packages would use dependencies with other features, and
# build them twice.
build: setup ## build the programs at target/release/dflash and target/release/dflash-engine
	$(CARGO) build $(CARGO_FLAGS) --workspace --bins

demo: build ## the whole pipeline on a synthetic corpus: corpus, target, hidden states, drafter, table
	@target/release/dflash demo $(DEMO_FLAGS)

test: build ## all tests, with the counts at the end
	@scripts/test.sh $(TEST_FLAGS)

soak: build ## train with fifty kill -9 at random moments, and compare with an uninterrupted run
	@scripts/soak.sh

hostile: build ## tests for mistakes and attacks by users, servers and clients, and 10,000 requests
	@scripts/hostile.sh

lint: setup ## format, lints, docs, dependency policy
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(CARGO_FLAGS) --workspace --no-deps --document-private-items
	@scripts/cargo-deny.sh

check: lint test ## lints and tests

# Skips, and says how to install it, where there is no Chromium.
pages: build ## the pages in a headless Chromium, and their screenshots in docs/figures
	DFLASH_WRITE_DOCS=1 $(CARGO) test $(CARGO_FLAGS) --workspace --test pages -- --nocapture

bench: build ## time a training step, a save and the start of the programs
	@scripts/bench.sh

# DEVICE=cpu is a dry run with small shapes. PEER_PYTHON names an interpreter with speculators.
bench-gpu: build ## parity, losses, step times and the whole pipeline on a GPU, as JSON in target/bench-gpu.json
	@scripts/bench_gpu.py pack target/bench-gpu
	@$(or $(PEER_PYTHON),python3) scripts/bench_gpu.py run target/bench-gpu --out target/bench-gpu.json \
		--device $(or $(DEVICE),cuda) $(if $(filter cpu,$(DEVICE)),--small) $(if $(SCRATCH),--scratch $(SCRATCH)) $(STAGES)

interop: build ## the official client on our server; a drafter in other engines, their acceptance compared with ours
	@scripts/openai_client.sh
	@scripts/interop.sh

recipes: build ## the recipes' pipelines with a stock vLLM, each on a tiny random model of its architecture
	@scripts/recipes.sh

wheel: build ## a Python wheel with the programs, in dist/
	@scripts/wheel.sh

archive: build ## a release archive with programs, completions and man pages, in dist/
	@scripts/archive.sh

install-test: wheel archive ## install wheel, archive and container image from scratch, and run the demo in each
	@scripts/try-wheel.sh
	@scripts/try-archive.sh
	@scripts/try-container.sh

book: ## the documentation as a book, in target/book (needs mdbook)
	@command -v mdbook >/dev/null || { echo "mdbook is missing; cargo install mdbook" >&2; exit 1; }
	mdbook build

clean: ## remove build outputs; libtorch stays in the user's cache
	$(CARGO) clean
	rm -rf demo-run dist .deps
