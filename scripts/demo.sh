#!/usr/bin/env bash
# The whole line on a made-up corpus: a tiny target is trained, answers the corpus's questions
# itself, serves its hidden states, and gets a drafter, which is then measured.
#
#   scripts/demo.sh [--fresh] [--dir DIR]
#
# Every finished stage is kept in the directory (demo-run), so an interrupted demo goes on where it
# stopped. --fresh starts over.
set -euo pipefail
cd "$(dirname "$0")/.."

run=demo-run
fresh=
while [ $# -gt 0 ]; do
  case $1 in
    --fresh) fresh=yes ;;
    --dir) run=${2:?--dir needs a directory}; shift ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done

readonly run
readonly dflash=target/release/dflash
readonly target=$run/target answers=$run/answers.jsonl data=$run/data drafts=$run/drafts
# Of the target's 8 layers; 0 would be the embedding's output.
readonly layers=(2 3 5 6)
readonly workers=2
server=
stage=

main() {
  [ -x "$dflash" ] || { echo "demo: $dflash is missing; run 'make demo' or 'make build'" >&2; exit 1; }
  [ -n "$fresh" ] && remove_run
  mkdir -p "$run"
  trap 'stop $?' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  SECONDS=0
  make_target
  regenerate_answers
  prepare_data
  train_drafter
  measure
}

# Only what a demo wrote is ever removed.
remove_run() {
  [ -e "$run" ] || return 0
  [ -f "$run/settings.json" ] || [ -z "$(ls -A "$run")" ] ||
    { echo "demo: $run was not made by the demo; remove it yourself" >&2; exit 1; }
  rm -rf "$run"
}

heading() { printf '\n[%s/5] %s (%d s so far)\n' "$1" "$2" "$SECONDS" >&2; }
kept() { echo "      kept from an earlier run: $1" >&2; }

# Runs one program in a way that a signal ends the wait for it at once.
step() {
  "$@" &
  stage=$!
  local status=0
  wait "$stage" || status=$?
  stage=
  [ "$status" -eq 0 ] || { echo "demo: stopped, exit code $status of: $*" >&2; exit "$status"; }
}

make_target() {
  heading 1 "a synthetic chat corpus, its tokenizer, and a tiny target trained on both"
  step "$dflash" demo-target --output "$run" >/dev/null
}

regenerate_answers() {
  heading 2 "dflash regenerate: the target answers the corpus's questions itself"
  [ -f "$answers" ] && { kept "$answers"; return; }
  step "$dflash" regenerate --target "$target" --data "$run/conversations.jsonl" \
    --output "$answers" --limit 3000 --max-new-tokens 128
}

prepare_data() {
  heading 3 "dflash prepare: answers to a tokenized, masked dataset"
  [ -d "$data" ] && { kept "$data"; return; }
  step "$dflash" prepare --target "$target" --data "$answers" --output "$data" --seq-length 1024 >&2
}

train_drafter() {
  heading 4 "dflash hidden-server and dflash train --nproc $workers against it"
  [ -f "$run/trained" ] && { kept "$(drafter)"; return; }
  start_server
  local resume=()
  [ -n "$(drafter)" ] && resume=(--resume)
  step "$dflash" train "${resume[@]}" \
    --target "$target" --speculator-type dflash --num-layers 2 \
    --data-path "$data" --vllm-endpoint "http://127.0.0.1:$(port)/v1" --save-path "$drafts" \
    --epochs 3 --lr 0.002 --total-seq-len 1024 --on-missing generate --on-generate delete \
    --seed 42 --target-layer-ids "${layers[@]}" --scheduler-type cosine --max-anchors 256 \
    --block-size 8 --anchors-per-sequence 64 --gamma 4 --max-steps 400 --nproc "$workers" \
    >/dev/null
  touch "$run/trained"
  stop_server
}

start_server() {
  rm -f "$run/port"
  "$dflash" hidden-server "$target" --target-layer-ids "${layers[@]}" --port 0 \
    --port-file "$run/port" >"$run/server.log" 2>&1 &
  server=$!
  local waited
  for waited in $(seq 300); do
    [ -s "$run/port" ] && { echo "      server at port $(port), log in $run/server.log" >&2; return; }
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  echo "demo: the hidden-state server did not start (waited $((waited / 10)) s):" >&2
  cat "$run/server.log" >&2
  exit 1
}

port() { grep -oE '[0-9]+$' "$run/port"; }

stop_server() {
  [ -z "$server" ] && return
  kill -TERM "$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
  server=
}

# The last checkpoint: their names sort by step.
drafter() { find "$drafts" -maxdepth 1 -name 'step-*' -type d 2>/dev/null | sort | tail -n1; }

measure() {
  heading 5 "dflash eval: speculative against plain greedy decoding"
  step "$dflash" eval --target "$target" --draft "$(drafter)" --prompts "$run/prompts.jsonl" \
    --max-new-tokens 128 --json "$run/eval.json" >"$run/table.txt"
  printf '\n'
  cat "$run/table.txt"
  printf '\ndrafter: %s\n' "$(realpath "$(drafter)")"
  printf 'done in %d s\n' "$SECONDS"
}

# Ends whatever still runs: first politely, after 5 s by force.
stop() {
  trap - EXIT INT TERM HUP
  local pids=()
  [ -n "$stage" ] && pids+=("$stage")
  [ -n "$server" ] && pids+=("$server")
  if [ ${#pids[@]} -gt 0 ]; then
    kill -TERM "${pids[@]}" 2>/dev/null || true
    local waited
    for waited in $(seq 50); do
      kill -0 "${pids[@]}" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
    [ "$1" -ge 128 ] && echo "demo: interrupted; 'make demo' goes on from here" >&2
  fi
  exit "$1"
}

main
