#!/usr/bin/env bash
# Serves a target with one of our drafters in a stock vLLM and compares vLLM's own acceptance
# counters with `dflash eval` on the same prompts.
#
#   TARGET=DIR DRAFT=DIR PROMPTS=FILE scripts/interop.sh
#
# Defaults: what the demo left in demo-run; the draft is the run's directory itself. Further variables: COUNT (100 prompts), TOKENS (220 new
# tokens), TOLERANCE (0.03), VLLM_CPU (a script with `install` and `serve MODEL PORT FLAGS...`).
# Where that script is absent, nothing is compared and the run says so.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=${VLLM_CPU:-../shared/tools/vllm_cpu.sh}
target=${TARGET:-demo-run/target}
prompts=${PROMPTS:-demo-run/prompts.jsonl}
draft=${DRAFT:-demo-run/drafts}
count=${COUNT:-100} tokens=${TOKENS:-220} tolerance=${TOLERANCE:-0.03}
out=${OUT:-target/interop}
server=

main() {
  [ -f "$vllm" ] || { echo "skipped: no stock vLLM at $vllm; set VLLM_CPU" >&2; exit 0; }
  for path in "$target/config.json" "$draft/config.json" "$prompts"; do
    [ -f "$path" ] || { echo "interop: $path is missing; run 'make demo' or set TARGET, DRAFT, PROMPTS" >&2; exit 1; }
  done
  mkdir -p "$out"
  trap stop EXIT
  echo "interop: dflash eval" >&2
  target/release/dflash eval --target "$target" --draft "$draft" --prompts "$prompts" \
    --limit "$count" --max-new-tokens "$tokens" --json "$out/eval.json"
  bash "$vllm" install >&2
  serve
  python3 scripts/interop.py --url "http://127.0.0.1:$port" --prompts "$prompts" \
    --count "$count" --tokens "$tokens" --eval "$out/eval.json" --tolerance "$tolerance"
}

serve() {
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  local block
  block=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["block_size"])' "$draft/config.json")
  echo "interop: starting vLLM on port $port, log in $out/vllm.log" >&2
  # Its own process group, so that its workers can be ended with it.
  setsid bash "$vllm" serve "$(realpath "$target")" "$port" --max-model-len "${MAX_MODEL_LEN:-1024}" \
    --speculative-config "{\"method\":\"dflash\",\"model\":\"$(realpath "$draft")\",\"num_speculative_tokens\":$((block - 1))}" \
    >"$out/vllm.log" 2>&1 &
  server=$!
  for _ in $(seq 300); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return
    kill -0 "$server" 2>/dev/null || break
    sleep 1
  done
  echo "interop: vLLM did not start; the end of its log:" >&2
  tail -n 40 "$out/vllm.log" >&2
  exit 1
}

stop() {
  [ -z "$server" ] && return
  kill -TERM -- "-$server" 2>/dev/null || true
  for _ in $(seq 50); do
    kill -0 -- "-$server" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$server" 2>/dev/null || true
}

main
