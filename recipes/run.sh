#!/usr/bin/env bash
# From conversations to a measured drafter, with a run file's settings: prepare, serve, train, eval.
#
#   recipes/run.sh recipes/qwen3-4b-1gpu.toml [flags of dflash train]
#
# What is there already is kept, and training resumes. GPUs are given by number: SERVE_GPUS, one for
# each endpoint of the run file, and TRAIN_GPUS.
set -euo pipefail

RUN=$1
shift
DATA=${DATA:-sharegpt}                     # a file of conversations, or a name that prepare knows
PROMPTS=${PROMPTS:-data/gsm8k_test.jsonl}  # rows with a question or messages
SERVE_GPUS=(${SERVE_GPUS:-0})
TRAIN_GPUS=${TRAIN_GPUS:-0}

# The resolved settings: a key's value without quotes, brackets and commas.
settings=$(dflash train "$RUN" "$@" --dump-config)
value() { sed -n "s/^$1 = //p" <<<"$settings" | tr -d '"[],'; }
MODEL=$(value verifier_name_or_path)
OUT=$(value save_path)
LAYERS=($(value target_layer_ids))

[ -d "$(value data_path)" ] ||
  dflash prepare --model "$MODEL" --data "$DATA" --output "$(value data_path)" \
    --seq-length "$(value total_seq_len)"

mkdir -p "$OUT.servers"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
number=0
for endpoint in $(value vllm_endpoint); do
  rm -f "$OUT.servers/$number"
  CUDA_VISIBLE_DEVICES=${SERVE_GPUS[$number]} dflash hidden-server "$MODEL" \
    --target-layer-ids "${LAYERS[@]}" --port "$(grep -oE '[0-9]+/' <<<"$endpoint" | tr -d /)" \
    --port-file "$OUT.servers/$number" &
  number=$((number + 1))
done
until [ "$(find "$OUT.servers" -type f -size +0 | wc -l)" -ge "$number" ]; do
  sleep 1
  [ "$(jobs -rp | wc -l)" -eq "$number" ] || { echo "a server did not start" >&2; exit 1; }
done

CUDA_VISIBLE_DEVICES=$TRAIN_GPUS dflash train "$RUN" "$@" --resume
dflash report "$OUT"

# The last step's name sorts last.
DRAFT=$(find "$OUT" -maxdepth 1 -name 'step-*' | sort | tail -n1)
CUDA_VISIBLE_DEVICES=${SERVE_GPUS[0]} dflash eval --target "$MODEL" --draft "$DRAFT" \
  --prompts "$PROMPTS" --limit 100 --max-new-tokens 512 --json "$OUT.eval.json"
