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
# Repeats the reference vectors in bfloat16: problems of half precision, such as a router near a tie, show
# here before they do on a GPU.
if [ $# -eq 0 ]; then
  DFLASH_TEST_DTYPE=bfloat16 run --workspace --test parity || status=$?
  # Runs the tests of `make bench-gpu` on a fake CUDA device: shapes, types and methods that a GPU's operators
  # refuse show here; values do not.
  for kind in float32 bfloat16; do
    (export DFLASH_TEST_DEVICE=fake_cuda DFLASH_TEST_DTYPE=$kind
     run --workspace --test parity --test attention --test golden) || status=$?
  done
  # Repeats the tests of per-level kernels at the lower CPU instruction levels, with libtorch at the same level:
  # reference vectors, packed weights, gradients, decoding. Under half a minute per level; individual kernels are
  # compared at all levels within one process (tests/levels.rs of dflash-kernels).
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
# Last, and in the form that continuous integration reads. Tests skipped for lack of external files count
# as passed.
awk '
  /^test result:/ { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^(passed|failed);$/) sum[$(i + 1)] += $i }
  /^skipped: /    { skipped++ }
  END { printf "\n%d passed, %d failed, %d skipped\n", sum["passed;"], sum["failed;"], skipped }
' "$log"
exit "$status"
