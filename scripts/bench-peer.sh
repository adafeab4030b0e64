#!/usr/bin/env bash
# Compares one training step of dflash with speculators' trainer on the same shapes, alternately, and
# prints medians and ratios. Both compute in float32 on a CPU, and in bfloat16 with DEVICE=cuda.
#
#   TARGET=DIR scripts/bench-peer.sh [SHAPE...]      shapes: a b c (default), p q
#
# PEER_PYTHON is an interpreter with speculators (default: scripts/engines sets one up); PEER_SCRIPT prints its JSON
# line (same keys as `dflash bench train-step --json`). ROUNDS (3) runs of each side, STEPS (5) steps a run.
# LEVEL (avx2, avx512, ...) limits both sides to a level of the processor's instructions.
# p and q are for a GPU and a target of 8 billion weights, such as scripts/random_target.py makes up.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly target=${TARGET:?a directory of the target model}
readonly peer_python=${PEER_PYTHON:-$(bash scripts/engines/python.sh)}
readonly peer_script=${PEER_SCRIPT:-scripts/engines/speculators_step.py}
readonly rounds=${ROUNDS:-3} steps=${STEPS:-5}
readonly device=${DEVICE:-cpu}
readonly out=${OUT:-target/bench-peer.jsonl}

# The peer's libtorch reads the level's variables too.
[ -z "${LEVEL:-}" ] || export $(target/release/dflash cpu-levels | sed -n "s/^$LEVEL //p")

# tokens, anchors, documents; 5 layers, 5 auxiliary layers, blocks of 16 in each
declare -A shapes=([a]="2048 128 8" [b]="4096 512 4" [c]="8192 1024 8" [p]="768 256 1" [q]="3072 512 4")

ours() {
  target/release/dflash bench train-step --target "$target" --tokens "$1" --anchors "$2" --docs "$3" \
    --block 16 --layers 5 --aux-layers 5 --steps "$steps" --device "$device" --json 2>/dev/null
}

peer() {
  "$peer_python" "$peer_script" "$target" --tokens "$1" --anchors "$2" --docs "$3" \
    --block 16 --layers 5 --aux-layers 5 --steps "$steps" --device "$device" 2>/dev/null | tail -n1
}

# A run that dies, for example out of memory, leaves a line that says so.
record() {
  local line
  line=$("$2" $3) && [ -n "$line" ] || line=null
  printf '{"shape": "%s", "side": "%s", "run": %s}\n' "$1" "$2" "$line" >>"$out"
}

mkdir -p "$(dirname "$out")"
: >"$out"
for shape in "${@:-a b c}"; do
  for name in $shape; do
    for _ in $(seq "$rounds"); do
      record "$name" ours "${shapes[$name]}"
      record "$name" peer "${shapes[$name]}"
    done
  done
done

python3 - "$out" <<'P'
import json, statistics, sys
runs = [json.loads(line) for line in open(sys.argv[1])]
print("| shape | side | runs | step, ms | slots/s | peak memory, MiB |\n|---|---|---|---|---|---|")
for shape in sorted({run["shape"] for run in runs}):
    sides = {}
    for side in ("ours", "peer"):
        mine = [run["run"] for run in runs if run["shape"] == shape and run["side"] == side and run["run"]]
        if not mine:
            print(f"| {shape} | {side} | 0 | ended without a result | | |")
            continue
        sides[side] = [statistics.median(run[key] for run in mine) for key in ("step_ms", "slots_per_s", "peak_mib")]
        step, slots, memory = sides[side]
        print(f"| {shape} | {side} | {len(mine)} | {step:,.0f} | {slots:,.0f} | {memory:,.0f} |")
    if len(sides) == 2:
        ours, peer = sides["ours"], sides["peer"]
        print(f"| {shape} | ratio | | {ours[0] / peer[0]:.2f} | {ours[1] / peer[1]:.2f} | {ours[2] / peer[2]:.2f} |")
P
