#!/usr/bin/env bash
# Times what a user waits for: the start of the front end and of the engine, a training step, the
# matmuls of decoding, and a save of 1.3 GB of state, including its memory. TARGET names the target whose
# dimensions the step uses; default: the demo's shape. LEVELS, such as "avx2 avx512" or all, are the CPU
# instruction levels of the step, one after the other; default: all instructions of the processor.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly dflash=target/release/dflash

# Median milliseconds of 21 runs of a command; its exit code does not matter.
median_ms() {
  local times=() began
  for _ in $(seq 21); do
    began=$(date +%s%N)
    "$@" >/dev/null 2>&1 || true
    times+=($((($(date +%s%N) - began) / 10000)))
  done
  printf '%s\n' "${times[@]}" | sort -n | sed -n 11p | awk '{ printf "%.1f", $1 / 100 }'
}

row() { printf '%-58s %8s ms\n' "$1" "$2"; }

row "dflash --help" "$(median_ms "$dflash" --help)"
row "dflash train --help" "$(median_ms "$dflash" train --help)"
row "engine to its first check (a missing model directory)" \
  "$(median_ms "$dflash" hidden-server /nonexistent --target-layer-ids 1)"

target=${TARGET:-target/bench/target}
[ -n "${TARGET:-}" ] ||
  "$dflash" demo-target --output target/bench --rows 20 --held-out 1 --steps 1 >/dev/null 2>&1
[ "${LEVELS:-}" != all ] || LEVELS=$("$dflash" cpu-levels | cut -d ' ' -f 1)
for level in ${LEVELS:-best}; do
  echo
  "$dflash" bench train-step --target "$target" $([ "$level" = best ] || echo "--cpu-level $level")
done

# The matmuls of decoding at every level, and their bounds.
echo
env -u LIBTORCH cargo run --release --quiet -p dflash-kernels --example kernels

# Seven layers make 1.3 GB. The build is that of `make test`.
echo
save=checkpoint::tests::saving_and_resuming_take_little_memory_beside_the_tensors
DFLASH_TEST_STATE_LAYERS=7 env -u LIBTORCH cargo test --release --workspace --lib --quiet \
  -- "$save" --exact --nocapture | grep -E '^(state of|saved in)'
