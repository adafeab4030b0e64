#!/usr/bin/env bash
# Builds the Python wheel into dist/: both programs, torch as a dependency. Needs maturin.
#
# The wheel's tag names the oldest glibc that it runs on: what the programs need, and at least 2.28,
# which torch's own wheel needs.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly programs=(target/release/dflash target/release/dflash-engine)
readonly data=target/wheel/data/scripts
readonly torch_glibc=2.28

fail() { echo "wheel: $*" >&2; exit 1; }

main() {
  command -v maturin >/dev/null || fail "maturin is missing; pip install maturin"
  command -v objdump >/dev/null || fail "objdump is missing; install binutils"
  [ -x "${programs[0]}" ] && [ -x "${programs[1]}" ] ||
    fail "the programs are missing; run 'make wheel' or 'make build'"
  rm -rf target/wheel dist/dflash-*.whl
  mkdir -p "$data"
  cp "${programs[1]}" "$data/"
  local tag
  tag=manylinux_$(glibc | tr . _)
  # So the front in the wheel is the one that was tested, and nothing is built a second time.
  CARGO="$PWD/scripts/cargo-workspace.sh" \
    maturin build --release --compatibility "$tag" --out dist
}

# The newest glibc that a program asks for.
glibc() {
  { echo "$torch_glibc"; objdump -T "${programs[@]}" | grep -oE 'GLIBC_[0-9.]+' | cut -d_ -f2; } |
    sort -uV | tail -n1
}

main
