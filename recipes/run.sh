#!/usr/bin/env bash
# From conversations to a measured drafter: runs every command with its table of one run file.
#
#   recipes/run.sh recipes/qwen3-4b-1gpu.toml [flags of dflash train]
#
# Existing results are kept, and training resumes. One server is started for each endpoint of the run
# file. If the file has no table [hidden_server], its vLLM must be running already (its first lines say
# how), and the drafter can be measured in a vLLM that serves it. SERVE_GPUS and TRAIN_GPUS select GPUs by
# number; on a CPU they have no effect.
set -euo pipefail

RUN=$1
shift
SERVE_GPUS=(${SERVE_GPUS:-0})
TRAIN_GPUS=${TRAIN_GPUS:-0}

# A resolved setting without quotes, brackets and commas: value COMMAND KEY [flags].
value() {
  local command=$1 key=$2
  shift 2
  dflash "$command" "$RUN" "$@" --dump-config | sed -n "s/^$key = //p" | tr -d '"[],'
}
OUT=$(value train save_path "$@")

if grep -q '^\[regenerate\]' "$RUN"; then
  [ -f "$(value regenerate output)" ] || dflash regenerate "$RUN"
fi
[ -d "$(value train data_path "$@")" ] || dflash prepare "$RUN"

if ! grep -q '^\[hidden_server\]' "$RUN"; then
  CUDA_VISIBLE_DEVICES=$TRAIN_GPUS dflash train "$RUN" "$@" --resume=auto
  dflash report "$OUT"
  exit
fi

mkdir -p "$OUT.servers"
rm -f "$OUT.servers"/*
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
number=0
for endpoint in $(value train vllm_endpoint "$@"); do
  CUDA_VISIBLE_DEVICES=${SERVE_GPUS[$number]:-0} dflash hidden-server "$RUN" \
    --port "$(grep -oE '[0-9]+/' <<<"$endpoint" | tr -d /)" --port-file "$OUT.servers/$number" &
  number=$((number + 1))
done
until [ "$(find "$OUT.servers" -type f -size +0 | wc -l)" -ge "$number" ]; do
  sleep 1
  [ "$(jobs -rp | wc -l)" -eq "$number" ] || { echo "a server did not start" >&2; exit 1; }
done

CUDA_VISIBLE_DEVICES=$TRAIN_GPUS dflash train "$RUN" "$@" --resume=auto
dflash report "$OUT"

# The last step's name sorts last.
DRAFT=$(find "$OUT" -maxdepth 1 -name 'step-*' | sort | tail -n1)
CUDA_VISIBLE_DEVICES=${SERVE_GPUS[0]} dflash eval "$RUN" --draft "$DRAFT"
