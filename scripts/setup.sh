#!/usr/bin/env bash
# Sets up what the build needs: checks the tools and links .deps/libtorch to libtorch 2.11.0.
#
# libtorch comes from, in this order: the link that is there, $DFLASH_LIBTORCH or $LIBTORCH, the
# user's cache, an installed Python torch, the wheel. Safe to run again, and quick when nothing is
# to do. Removing .deps/ starts over. DFLASH_SETUP_CUDA=1 fetches CUDA's libraries too on a machine
# without a GPU, to build for one that has it.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly version=2.11.0
readonly cache=${XDG_CACHE_HOME:-$HOME/.cache}/dflash
readonly installed=$cache/libtorch-$version
readonly link=.deps/libtorch

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

main() {
  check_tools
  link_libtorch
}

check_tools() {
  command -v cargo >/dev/null || fail "cargo is missing; install Rust from https://rustup.rs"
  local found need
  found=$(cargo --version | cut -d' ' -f2)
  need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  older "$found" "$need" && fail "cargo $found is too old, $need is needed; run 'rustup update'"
  command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    fail "no C++ compiler; install g++ (Debian and Ubuntu: apt-get install g++)"
}

# Whether version $1 is older than version $2.
older() { [ "$1" != "$2" ] && [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1)" = "$1" ]; }

link_libtorch() {
  usable "$link" && return
  local from
  from=$(find_libtorch) || { install_wheel; from=$installed/torch; }
  mkdir -p .deps
  ln -sfn "$(realpath "$from")" "$link"
  say "$link -> $(realpath "$from")"
}

# Whether $1 is a libtorch of the right release.
usable() {
  [ -f "$1/lib/libtorch_cpu.so" ] && [ -f "$1/lib/libc10.so" ] && [ -d "$1/include" ] &&
    grep -qsE "(^__version__ = ['\"]|^)2\.11\." "$1/version.py" "$1/build-version"
}

find_libtorch() {
  local candidate
  for candidate in "${DFLASH_LIBTORCH:-}" "${LIBTORCH:-}"; do
    [ -z "$candidate" ] && continue
    usable "$candidate" && { echo "$candidate"; return; }
    say "ignoring $candidate: not a libtorch $version with headers"
  done
  # With a GPU, an installed torch is complete and the cached one is not, so it goes first.
  if [ -e /dev/nvidiactl ]; then python_torch || cached_torch; else cached_torch || python_torch; fi
}

cached_torch() { usable "$installed/torch" && echo "$installed/torch"; }

python_torch() {
  local found
  found=$(python3 -I -c 'import importlib.util as u
s = u.find_spec("torch")
print(next(iter(s.submodule_search_locations or []), "") if s else "")' 2>/dev/null) || return 1
  [ -n "$found" ] && usable "$found" && echo "$found"
}

install_wheel() {
  command -v python3 >/dev/null || fail "python3 is missing; it fetches libtorch from its wheel"
  local pip=(python3 -m pip)
  "${pip[@]}" --version >/dev/null 2>&1 ||
    fail "python3 has no pip (Debian and Ubuntu: apt-get install python3-pip)"
  mkdir -p "$cache"
  local aside=$installed.$$.tmp
  # shellcheck disable=SC2064  # the name is wanted as it is now
  trap "rm -rf '$aside'" EXIT
  say "installing libtorch $version to $installed (about 600 MB to fetch, 1.3 GB on disk)"
  "${pip[@]}" install --disable-pip-version-check --root-user-action=ignore --no-warn-conflicts --target "$aside" \
    "$(extent)" "torch==$version" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*" >&2 ||
    fail "pip could not install torch==$version; is there a network, and a wheel for this platform?"
  usable "$aside/torch" || fail "the wheel of torch $version is not what was expected"
  rm -rf "$installed"
  mv "$aside" "$installed"
}

# A CPU needs the wheel and two small libraries that it links; a GPU needs all that it asks for.
extent() { if [ -e /dev/nvidiactl ] || [ "${DFLASH_SETUP_CUDA:-0}" = 1 ]; then echo --upgrade; else echo --no-deps; fi; }

main "$@"
