#!/usr/bin/env bash
# Kills trainings with kill -9 at random moments, saves included, and checks that nothing that was
# saved is lost and that every loss is in the end what it would have been. KILLS says how often; a
# few kills are part of the ordinary tests.
set -euo pipefail
cd "$(dirname "$0")/.."

DFLASH_SOAK_KILLS=${KILLS:-50} env -u LIBTORCH \
  cargo test --release --workspace --test train -- soak --test-threads 1 --nocapture
