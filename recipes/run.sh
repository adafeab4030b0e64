#!/usr/bin/env bash
# From conversations to a measured drafter: runs every command with its table of one run file.
#
#   recipes/run.sh [--dry-run] recipes/qwen3-4b-1gpu.toml [flags of dflash train]
#
# Existing results are kept, and training resumes. --dry-run prints the commands instead. A run file with a
# table [hidden_server] gets a server for each of its endpoints. Without one, the trainers run the target
# themselves (colocate), or a vLLM must be running already (the run file's first lines say how); such a
# drafter can be measured in a vLLM that serves it.
#
# DFLASH names the program; otherwise it is the source tree's, or that of the path. SERVE_GPUS ("0 1") and
# TRAIN_GPUS ("2,3") select GPUs by number. By default the first GPUs serve, one each, and the others train;
# if there are too few, trainers share them. On a CPU they have no effect.
set -euo pipefail

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
RUN=${1:?usage: recipes/run.sh [--dry-run] RUN_FILE [flags of dflash train]}
shift
built=$(dirname "$0")/../target/release/dflash
if [ -z "${DFLASH:-}" ]; then
  if [ -x "$built" ]; then DFLASH=$built; else DFLASH=dflash; fi
fi
command -v "$DFLASH" >/dev/null ||
  { echo "$DFLASH is not there: build it (make build), install it, or name it with DFLASH" >&2; exit 127; }

# Runs a command of the program, or prints it.
run() {
  if [ -n "$dry" ]; then echo "${gpus:+CUDA_VISIBLE_DEVICES=$gpus }dflash $*"; return; fi
  if [ -n "${gpus:-}" ]; then CUDA_VISIBLE_DEVICES=$gpus "$DFLASH" "$@"; else "$DFLASH" "$@"; fi
}

# A resolved setting without quotes, brackets and commas: value COMMAND KEY [flags].
value() {
  local command=$1 key=$2
  shift 2
  "$DFLASH" "$command" "$RUN" "$@" --dump-config | sed -n "s/^$key = //p" | tr -d '"[],'
}

has() { grep -q "^\[$1\]" "$RUN"; }

OUT=$(value train save_path "$@")

# The GPUs that serve, and those that train: of `servers` servers and as many ranks as the run has.
servers=0
if has hidden_server; then
  servers=$(value train vllm_endpoint "$@" | wc -w)
fi
# No driver, no GPUs.
count=${GPU_COUNT:-$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)}
serve=(${SERVE_GPUS:-})
train=${TRAIN_GPUS:-}
if [ "$servers" -gt 0 ] && [ "$count" -gt 0 ]; then
  if [ ${#serve[@]} -eq 0 ]; then
    for ((number = 0; number < servers; number++)); do serve+=($((number % count))); done
  fi
  if [ -z "$train" ] && [ "$count" -gt "$servers" ]; then
    train=$(seq -s, "$servers" $((count - 1)))
  fi
fi

if has regenerate; then
  answers=$(value regenerate output)
  [ -n "$dry" ] || mkdir -p "$(dirname "$answers")"
  [ -f "$answers" ] || run regenerate "$RUN"
fi
[ -d "$(value train data_path "$@")" ] || run prepare "$RUN"

if [ "$servers" -gt 0 ]; then
  if [ -z "$dry" ]; then
    mkdir -p "$OUT.servers"
    rm -f "$OUT.servers"/*
    trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
  fi
  number=0
  for endpoint in $(value train vllm_endpoint "$@"); do
    port=$(grep -oE ':[0-9]+/' <<<"$endpoint" | tr -d :/)
    gpus=${serve[$number]:-${serve[0]:-}}
    if [ -n "$dry" ]; then
      run hidden-server "$RUN" --port "$port" --port-file "$OUT.servers/$number"
    else
      # exec, so that the signal that ends it reaches the program
      (
        if [ -n "$gpus" ]; then export CUDA_VISIBLE_DEVICES=$gpus; fi
        exec "$DFLASH" hidden-server "$RUN" --port "$port" --port-file "$OUT.servers/$number"
      ) &
    fi
    number=$((number + 1))
  done
  until [ -n "$dry" ] || [ "$(find "$OUT.servers" -type f -size +0 | wc -l)" -ge "$number" ]; do
    sleep 1
    [ "$(jobs -rp | wc -l)" -eq "$number" ] || { echo "a server did not start" >&2; exit 1; }
  done
fi

gpus=$train
run train "$RUN" "$@" --resume=auto
gpus=
run report "$OUT"

# The run's directory is its best checkpoint, or the newest if nothing was validated.
if has eval; then
  gpus=${serve[0]:-${train%%,*}}
  run eval "$RUN" --draft "$OUT"
fi
