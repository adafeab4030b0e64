#!/usr/bin/env bash
# Rewrites the diagram and table of crates in ARCHITECTURE.md from Cargo's metadata. The test that checks
# the section also writes it, so there is one implementation.
set -euo pipefail
cd "$(dirname "$0")/.."
DFLASH_WRITE_DOCS=1 cargo test --release --workspace --test workspace crate_diagram
