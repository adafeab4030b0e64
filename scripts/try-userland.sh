#!/usr/bin/env bash
# Installs the wheel of dist/ in the root directories of other distributions, and runs version, doctor and demo
# there under `chroot`. Needs root. libtorch is the one that DFLASH_LIBTORCH names, by default .deps/libtorch.
#
#   debootstrap --variant=minbase --include=python3,python3-venv trixie /srv/trixie
#   scripts/try-userland.sh /srv/trixie...
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/try.sh

main() {
  [ $# -gt 0 ] || fail "name the root directories of the distributions to try"
  [ "$(id -u)" = 0 ] || fail "chroot needs root"
  local wheels=(dist/dflash_train-*.whl)
  wheel=$(realpath "${wheels[0]}")
  [ -f "$wheel" ] || fail "no wheel in dist/; run 'make wheel'"
  # With the libraries that its wheel has beside it.
  libtorch=$(realpath "${DFLASH_LIBTORCH:-.deps/libtorch}")
  for root in "$@"; do (try_root "$root"); done
}

# In a subshell, whose end unmounts what it mounted.
try_root() {
  local root=$1
  [ -x "$root/usr/bin/python3" ] || fail "$root has no python3"
  here=$root/try-dflash
  mkdir -p "$here/libtorch"
  trap 'umount "$root/proc" "$here/libtorch" 2>/dev/null; rm -rf --one-file-system "$here"' EXIT
  mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
  mount --bind -o ro "$(dirname "$libtorch")" "$here/libtorch"
  cp "$wheel" "$here/"
  inside "$root" python3 -m venv /try-dflash/env
  inside "$root" /try-dflash/env/bin/pip --disable-pip-version-check install --quiet --no-deps "/try-dflash/$(basename "$wheel")"
  local program
  for program in dflash dflash-train; do
    inside "$root" "/try-dflash/env/bin/$program" doctor --offline >"$here/doctor" || fail "$root: $program doctor: $(cat "$here/doctor")"
  done
  inside "$root" /try-dflash/env/bin/dflash demo --quick --fresh --dir /try-dflash/demo >"$here/table" 2>"$here/said" ||
    fail "$root: the demo failed: $(tail -n5 "$here/said")"
  grep -q 'acceptance length' "$here/table" || fail "$root: no table: $(cat "$here/table")"
  echo "$(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' "$root/etc/os-release"), glibc $(inside "$root" ldd --version | sed -n '1s/.* //p'): doctor and demo are fine"
}

inside() {
  local root=$1
  shift
  chroot "$root" env -i HOME=/try-dflash PATH=/usr/bin:/bin \
    DFLASH_LIBTORCH="/try-dflash/libtorch/$(basename "$libtorch")" "$@"
}

main "$@"
