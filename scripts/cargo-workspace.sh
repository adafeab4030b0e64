#!/usr/bin/env bash
# Cargo wrapper for maturin, which builds one package: builds the programs of the whole workspace instead,
# as `make build` does. A single package would use dependencies with other features, and build them twice.
set -euo pipefail
[ "${1:-}" = rustc ] || exec cargo "$@"
exec cargo build --release --workspace --bins --message-format json-render-diagnostics
