#!/usr/bin/env bash
# A drafter for Qwen3-8B on four GPUs: two serve hidden states, two train.
#
# 5 layers, blocks of 16, five captured layers, learning rate 6e-4 with a cosine, as in the DFlash
# paper. For the paper's acceptance, train on answers that the target wrote itself (dflash
# regenerate) and on more of them: its recipe is 800,000 rows for 6 epochs.
set -euo pipefail

MODEL=${MODEL:-models/Qwen3-8B}            # huggingface-cli download Qwen/Qwen3-8B --local-dir ...
PROMPTS=${PROMPTS:-data/gsm8k_test.jsonl}  # rows with a question or messages
OUT=${OUT:-output/qwen3-8b}
LAYERS=(2 10 18 26 34)                     # ours; 1 9 17 25 33 in z-lab's counting

# 1. Conversations to a dataset. No GPU.
dflash prepare --model "$MODEL" --data sharegpt --output "$OUT/data" --seq-length 8192

# 2. Two servers, one a GPU.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for gpu in 0 1; do
  CUDA_VISIBLE_DEVICES=$gpu dflash hidden-server "$MODEL" \
    --target-layer-ids "${LAYERS[@]}" --port $((8000 + gpu)) --port-file "$OUT/port-$gpu" &
done
until [ -s "$OUT/port-0" ] && [ -s "$OUT/port-1" ]; do
  sleep 1
  [ "$(jobs -rp | wc -l)" -eq 2 ] || { echo "a server did not start" >&2; exit 1; }
done

# 3. Two ranks on the other GPUs. Under torchrun the same line works without --nproc:
#    torchrun --no-python --standalone --nproc-per-node 2 dflash train ...
CUDA_VISIBLE_DEVICES=2,3 dflash train --nproc 2 \
  --verifier-name-or-path "$MODEL" \
  --speculator-type dflash \
  --num-layers 5 \
  --data-path "$OUT/data" \
  --vllm-endpoint http://localhost:8000/v1,http://localhost:8001/v1 \
  --save-path "$OUT/drafts" \
  --epochs 3 \
  --lr 0.0006 \
  --total-seq-len 8192 \
  --on-missing generate \
  --on-generate delete \
  --seed 42 \
  --draft-vocab-size 32000 \
  --target-layer-ids "${LAYERS[@]}" \
  --scheduler-type cosine \
  --max-anchors 3072

# 4. What it is worth. The last step's name sorts last.
DRAFT=$(find "$OUT/drafts" -maxdepth 1 -name 'step-*' | sort | tail -n1)
CUDA_VISIBLE_DEVICES=0 dflash eval --target "$MODEL" --draft "$DRAFT" --prompts "$PROMPTS" \
  --limit 100 --max-new-tokens 512 --json "$OUT/eval.json"

echo "serve it: vllm serve $MODEL --speculative-config '{\"method\": \"dflash\", \"model\": \"$DRAFT\", \"num_speculative_tokens\": 15}'"
