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
  local counts filter
  counts=$(awk '/^test result:/ { passed += $4; failed += $6; sub(/s$/, "", $NF); seconds += $NF }
    END { printf "%d passed, %d failed, %.0f s", passed, failed, seconds }' <<<"$said")
  printf '%-58s %s\n' "$what" "$counts"
  if [ "$status" -ne 0 ]; then
    failed=1
    grep -E '^test .* FAILED$|^error' <<<"$said" >&2
  fi
  # A module that was renamed must not disappear silently.
  for filter in "$@"; do
    if ! grep -qE "^test [^ ]*$filter.* \.\.\. " <<<"$said"; then
      echo "no test of '$filter' ran: rename it in scripts/hostile.sh too" >&2
      failed=1
    fi
  done
}

suite "ranks agree on everything" "--test train" alike:: nodes:: places::
suite "targets have an identity" "--test train" identity::
suite "resume says what it does" "--test train" resume::
suite "diverged runs end well" "--test train" divergence::
suite "runs speak, signals, trackers" "--test train" speaking:: ending:: first_step::
suite "a source is proved before the first step" "--test train" preflight::
suite "a wrong or hostile server does no harm" "--test train" servers::
suite "clients of hostile servers, the wire, the server pressed" "--test it" hostile:: pressure:: https:: vllm_server:: own_server::
suite "pages, greedy and odd clients of serve, servers that stumble" "--test it" guests:: limits:: room:: servers::
suite "answers of the Hub that are lost" "--test push" lost stumbles
suite "formats, tools, echo, grammars and what is sampled" "--test it" formats:: tools:: echo:: grammars:: distributions::
suite "answers, chats and Ctrl-C" "--test answers" ""
suite "exported drafts, passes without memory" "--test train" export:: no_memory::
suite "checkpoints" "--test it" checkpoints::
suite "published results" "--test push" results
suite "locks, leftovers, events, digests of data" "--lib" lock::tests:: killed sweeps events::tests:: digest
suite "damaged replies, streams and files" "--lib" damaged
suite "a lost reader is no success" "--test workspace" streams::
suite "hostile values, on every flag" "--test hostile" ""
suite "limits of the machine, the disk and the terminal" "--test train" limits::
suite "faulty data" "--test prepare --test regenerate" ""

# A learning rate at which a draft diverges; the logits of targets trained for fewer than about 100 steps are
# too small for that.
thrown_off() { # DIRECTORY OF THE DEMO
  local dir said
  dir=$(mktemp -d)
  said=$(target/release/dflash train --target "$1/target" --data-path "$1/data" --colocate \
    --save-path "$dir/run" --num-layers 1 --block-size 4 --target-layer-ids 1 2 3 --total-seq-len 512 \
    --anchors-per-sequence 8 --max-steps 30 --lr 10 --allow-any-lr --scheduler-type wsd --decay-ratio 0 2>&1)
  local status=$?
  rm -rf "$dir"
  if [ "$status" -eq 1 ] && grep -q "the run has diverged: at step 30" <<<"$said"; then
    echo "a run at --lr 10 is no success"
  else
    printf 'a run at --lr 10 ended with %s:\n%s\n' "$status" "$said" >&2
    failed=1
  fi
}

demo=demo-run
if ! [ -f $demo/target/config.json ] || ! [ -d $demo/data ]; then
  echo "making a small target, because there is no demo's" >&2
  demo=$(mktemp -d)
  trap 'rm -rf "$demo"' EXIT
  made=$({ target/release/dflash demo-target --rows 600 --held-out 4 --steps 150 --output "$demo" &&
    target/release/dflash prepare --seq-length 1024 --target "$demo/target" \
      --data "$demo/conversations.jsonl" --output "$demo/data"; } 2>&1) || { echo "$made" >&2; exit 1; }
fi
thrown_off "$demo"
target=${TARGET:-$demo/target}
python3 scripts/server_load.py "$target" --requests "${REQUESTS:-10000}" || failed=1
python3 scripts/serve_load.py "$target" --requests "${REQUESTS:-10000}" || failed=1
exit "$failed"
