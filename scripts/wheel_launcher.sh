#!/usr/bin/env bash
# The wheel's program dflash is dflash-train, beside this file; this is its short name, which another package
# may take.
exec -a "$0" "$(dirname -- "$(readlink -f -- "$0")")/dflash-train" "$@"
