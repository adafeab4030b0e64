#!/usr/bin/env bash
# Runs all tests for mistakes and attacks: ranks with different settings, other targets, changed resumed
# runs, divergence, faulty servers, damaged messages, overload, clients that disconnect, absurd numbers,
# faulty data. Then sends 10,000 requests to a real server. Except for these, the tests are part of
# `make test`.
#
#   TARGET=DIR REQUESTS=10000 scripts/hostile.sh
set -uo pipefail
cd "$(dirname "$0")/.."

failed=0
suite() { # WHAT TARGET FILTER...
  local what=$1 target=$2
  shift 2
  local said
  said=$(env -u LIBTORCH cargo test --release --workspace --no-fail-fast $target -- "$@" 2>&1)
  local status=$?
  # tests, and seconds of the slowest binary's
  local counts
  counts=$(awk '/^test result:/ { passed += $4; failed += $6; sub(/s$/, "", $NF); seconds += $NF }
    END { printf "%d passed, %d failed, %.0f s", passed, failed, seconds }' <<<"$said")
  printf '%-58s %s\n' "$what" "$counts"
  if [ "$status" -ne 0 ]; then
    failed=1
    grep -E '^test .* FAILED$|^error' <<<"$said" >&2
  fi
}

suite "ranks agree on everything" "--test train" alike:: nodes:: places::
suite "targets have an identity" "--test train" identity::
suite "resume says what it does" "--test train" resume::
suite "diverged runs end well" "--test train" divergence::
suite "runs speak, signals, trackers" "--test train" speaking:: ending:: first_step::
suite "a source is proved before the first step" "--test train" preflight::
suite "a wrong or hostile server does no harm" "--test train" servers::
suite "clients of hostile servers, the wire, the server pressed" "--test it" hostile:: pressure:: https:: vllm_server:: own_server::
suite "pages, greedy and odd clients of serve, servers that stumble" "--test it" guests:: limits:: servers::
suite "answers of the Hub that are lost" "--test push" lost stumbles
suite "damaged replies, streams and files" "--lib" damaged
suite "a lost reader is no success" "--test workspace" streams::
suite "hostile values, on every flag" "--test hostile" ""
suite "limits of the machine, the disk and the terminal" "--test train" limits::
suite "faulty data" "--test prepare --test regenerate" ""

# A rate that throws a draft of a trained target off; targets of a few steps have too small logits for that.
thrown_off() {
  local dir said
  dir=$(mktemp -d)
  said=$(target/release/dflash train --target demo-run/target --data-path demo-run/data --colocate \
    --save-path "$dir/run" --num-layers 1 --block-size 4 --target-layer-ids 1 2 3 --total-seq-len 512 \
    --anchors-per-sequence 8 --max-steps 30 --lr 10 --scheduler-type wsd --decay-ratio 0 2>&1)
  local status=$?
  rm -rf "$dir"
  if [ "$status" -eq 1 ] && grep -q "the run has diverged: at step 30" <<<"$said"; then
    echo "a run at --lr 10 is no success"
  else
    printf 'a run at --lr 10 ended with %s:\n%s\n' "$status" "$said" >&2
    failed=1
  fi
}
if [ -f demo-run/target/config.json ] && [ -d demo-run/data ]; then
  thrown_off
else
  echo "skipped: no demo's target to throw a run off; run 'make demo'" >&2
fi

target=${TARGET:-}
for dir in demo-run/target target/release/dflash-tests-demo/target; do
  [ -z "$target" ] && [ -f "$dir/config.json" ] && target=$dir
done
if [ -n "$target" ]; then
  python3 scripts/server_load.py "$target" --requests "${REQUESTS:-10000}" || failed=1
  python3 scripts/serve_load.py "$target" --requests "${REQUESTS:-10000}" || failed=1
else
  echo "skipped: no target for the crowd; run 'make demo' or set TARGET" >&2
fi
exit "$failed"
