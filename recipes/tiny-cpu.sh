#!/usr/bin/env bash
# The steps of qwen3-8b-4xh100.sh on two CPU cores, for a target of a few million weights.
# MODEL and QUESTIONS default to what `make demo` leaves in demo-run.
set -euo pipefail

MODEL=${MODEL:-demo-run/target}
QUESTIONS=${QUESTIONS:-demo-run/conversations.jsonl}
PROMPTS=${PROMPTS:-demo-run/prompts.jsonl}
OUT=${OUT:-output/tiny}
LAYERS=(2 3 5 6)

mkdir -p "$OUT"

# The target's own answers: what a drafter should be trained on.
[ -f "$OUT/answers.jsonl" ] ||
  dflash regenerate --model "$MODEL" --data "$QUESTIONS" --output "$OUT/answers.jsonl" --limit 2560
[ -d "$OUT/data" ] ||
  dflash prepare --model "$MODEL" --data "$OUT/answers.jsonl" --output "$OUT/data" --seq-length 2048

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
rm -f "$OUT/port"
dflash hidden-server "$MODEL" --target-layer-ids "${LAYERS[@]}" --port 0 --port-file "$OUT/port" &
until [ -s "$OUT/port" ]; do
  sleep 0.2
  [ -n "$(jobs -rp)" ] || { echo "the server did not start" >&2; exit 1; }
done

dflash train \
  --verifier-name-or-path "$MODEL" \
  --num-layers 4 --block-size 8 --target-layer-ids "${LAYERS[@]}" \
  --data-path "$OUT/data" --vllm-endpoint "http://127.0.0.1:$(grep -oE '[0-9]+$' "$OUT/port")/v1" \
  --save-path "$OUT/drafts" \
  --max-steps 1000 --lr 6e-4 --gamma 4 \
  --total-seq-len 2048 --max-anchors 256 --anchors-per-sequence 256

DRAFT=$(find "$OUT/drafts" -maxdepth 1 -name 'step-*' | sort | tail -n1)
dflash eval --target "$MODEL" --draft "$DRAFT" --prompts "$PROMPTS" --limit 100 \
  --max-new-tokens 220 --json "$OUT/eval.json"
