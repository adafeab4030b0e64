#!/usr/bin/env bash
# Runs all tests and closes with the counts. Arguments go to `cargo test`.
set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT

env -u LIBTORCH cargo test --release --workspace --no-fail-fast "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

awk '
  /^test result:/ { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^(passed|failed|ignored);$/) sum[$(i + 1)] += $i }
  /^skipped: /    { skipped++ }
  END { printf "\n%d passed, %d failed, %d ignored, %d skipped for want of outside material\n",
        sum["passed;"], sum["failed;"], sum["ignored;"], skipped }
' "$log"
if [ "$status" -ne 0 ]; then
  echo "failed:"
  grep -E '^test .* \.\.\. FAILED$|^error: could not compile' "$log" | sort -u
fi
exit "$status"
