#!/usr/bin/env bash
# Runs all tests and prints the counts at the end. Arguments, such as `-p dflash-data`, go to `cargo test`
# instead of `--workspace`.
#
# Tests that need external files print "skipped: ..." if these are absent. The output of passing tests is
# read to count those lines, and otherwise hidden.
set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT

run() {
  env -u LIBTORCH cargo test --release --no-fail-fast "$@" -- --show-output 2>&1 |
    tee -a "$log" |
    awk '
      /^successes:$/               { hide = 1 }
      /^failures:$|^test result:/  { hide = 0 }
      !hide || /^skipped: /        { print; fflush() }
    '
  return "${PIPESTATUS[0]}"
}

run "${@:---workspace}"
status=$?
# The reference vectors once more in bfloat16 and its bound: what half precision upsets, such as a router near a
# tie, shows here and not first on a GPU.
if [ $# -eq 0 ]; then
  DFLASH_TEST_DTYPE=bfloat16 run --workspace --test parity || status=$?
  # What `make bench-gpu` tests on a GPU, on a fake CUDA device: shapes, kinds and methods that a GPU's operators
  # refuse show here; values do not.
  for kind in float32 bfloat16; do
    (export DFLASH_TEST_DEVICE=fake_cuda DFLASH_TEST_DTYPE=$kind
     run --workspace --test parity --test attention --test golden) || status=$?
  done
  # What has kernels for each level of the processor's instructions once more at the lower ones, with libtorch
  # at the same level: reference vectors, packed weights, gradients, decoding. Under half a minute a level; the kernels
  # one by one are compared at all levels within one process (tests/levels.rs of dflash-kernels).
  best=$(target/release/dflash cpu-levels | tail -n 1)
  while read -r -u 3 level variables; do
    [ "$level" = "${best%% *}" ] && continue
    echo "at the level $level:"
    for tests in "--test parity --test packed --test gradients --test golden" "--tests decoding::"; do
      (export $variables; run --workspace $tests) || status=$?
    done
  done 3< <(target/release/dflash cpu-levels)
fi

if [ "$status" -ne 0 ]; then
  echo "failed:"
  grep -E '^test .* \.\.\. FAILED$|^error: could not compile' "$log" | sort -u
fi
# Last, and in the form that continuous integration reads. What was skipped for want of outside
# material counts as passed too.
awk '
  /^test result:/ { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^(passed|failed);$/) sum[$(i + 1)] += $i }
  /^skipped: /    { skipped++ }
  END { printf "\n%d passed, %d failed, %d skipped\n", sum["passed;"], sum["failed;"], skipped }
' "$log"
exit "$status"
