#!/usr/bin/env bash
# Kills training runs with kill -9 at random moments, also during saves, and checks that nothing saved is
# lost and that every loss is the same as in an uninterrupted run. KILLS is the number of kills; a few are
# part of the ordinary tests.
set -euo pipefail
cd "$(dirname "$0")/.."

DFLASH_SOAK_KILLS=${KILLS:-50} env -u LIBTORCH \
  cargo test --release --workspace --test train -- soak --test-threads 1 --nocapture
