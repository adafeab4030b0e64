#!/usr/bin/env bash
# Sets up the build: checks the tools and links .deps/libtorch to libtorch 2.11.0.
#
# libtorch is taken from, in this order: the existing link, $DFLASH_LIBTORCH or $LIBTORCH, the user's
# cache, an installed Python torch, the wheel. It can be run repeatedly, and is quick if there is nothing to
# do. Removing .deps/ starts over. DFLASH_SETUP_CUDA=1 also fetches CUDA's libraries on a machine
# without a GPU, to build for one that has it.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly version=2.11.0
readonly cache=${XDG_CACHE_HOME:-$HOME/.cache}/dflash
readonly installed=$cache/libtorch-$version
readonly link=.deps/libtorch
# Exists if NVIDIA's driver is loaded.
readonly gpu=/dev/nvidiactl
# The driver that torch 2.11.0 from PyPI needs, because it is built for CUDA 13.
readonly driver=580

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

# Whether CUDA's libraries are wanted: if there is a GPU, or on request.
wants_cuda() { [ -e "$gpu" ] || [ "${DFLASH_SETUP_CUDA:-0}" = 1 ]; }

link_libtorch() {
  check_driver
  complete "$link" && return
  usable "$link" && say "$link has no CUDA libraries, which a GPU needs; looking for one that has"
  local from
  from=$(find_libtorch) || { install_wheel; from=$installed/torch; }
  mkdir -p .deps
  ln -sfn "$(realpath "$from")" "$link"
  say "$link -> $(realpath "$from")"
}

# An older driver shows no GPU to this libtorch.
check_driver() {
  local found
  found=$(sed -n 's/^NVRM version:.*[^0-9]\([0-9][0-9][0-9]\)\.[0-9.]*.*/\1/p' /proc/driver/nvidia/version 2>/dev/null || true)
  [ -n "$found" ] && older "$found" "$driver" &&
    say "NVIDIA driver $found is older than $driver, which CUDA 13 needs: update it, or see docs/install.md"
  return 0
}

# Whether $1 is a usable libtorch, with CUDA's libraries if wanted: a GPU node may share its cache with a
# login node, which fetched none.
complete() { usable "$1" && { ! wants_cuda || has_cuda "$1"; }; }

# Whether CUDA's libraries are where libtorch $1 looks for them.
has_cuda() {
  local root
  root=$(realpath "$1")
  [ -f "$root/lib/libtorch_cuda.so" ] || return 1
  compgen -G "$root/../nvidia/cu13/lib/libcublas.so.*" >/dev/null ||
    compgen -G "$root/../nvidia/cublas/lib/libcublas.so.*" >/dev/null ||
    compgen -G "$root/lib/libcublas.so.*" >/dev/null
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
    if usable "$candidate"; then
      # An explicitly named one is used.
      complete "$candidate" || say "$candidate has no CUDA libraries: it computes on the CPU alone"
      echo "$candidate"
      return
    fi
    say "ignoring $candidate: not a libtorch $version with headers"
  done
  cached_torch || python_torch
}

cached_torch() { complete "$installed/torch" && echo "$installed/torch"; }

python_torch() {
  local found
  found=$(python3 -I -c 'import importlib.util as u
s = u.find_spec("torch")
print(next(iter(s.submodule_search_locations or []), "") if s else "")' 2>/dev/null) || return 1
  [ -n "$found" ] && complete "$found" && echo "$found"
}

install_wheel() {
  command -v python3 >/dev/null || fail "python3 is missing; it fetches libtorch from its wheel"
  local pip=(python3 -m pip)
  "${pip[@]}" --version >/dev/null 2>&1 ||
    fail "python3 has no pip (Debian and Ubuntu: apt-get install python3-pip)"
  mkdir -p "$cache"
  local aside=$installed.$$.tmp
  # shellcheck disable=SC2064  # expand the name now
  trap "rm -rf '$aside'" EXIT
  local size="about 600 MB to fetch, 1.3 GB on disk" remedy="is there a network, and a wheel for this platform?"
  if wants_cuda; then
    size="with CUDA's libraries about 2.7 GB to fetch, 5 GB on disk"
    remedy="$remedy DFLASH_SETUP_CUDA=1 make setup fetches CUDA's libraries where there is a network but no GPU"
  fi
  say "installing libtorch $version to $installed ($size)"
  "${pip[@]}" install --disable-pip-version-check --root-user-action=ignore --no-warn-conflicts --target "$aside" \
    "$(extent)" "torch==$version" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*" >&2 ||
    fail "pip could not install torch==$version; $remedy"
  usable "$aside/torch" || fail "the wheel of torch $version is not what was expected"
  rm -rf "$installed"
  mv "$aside" "$installed"
}

# A CPU needs the wheel and two small libraries; a GPU needs all of the wheel's dependencies.
extent() { if wants_cuda; then echo --upgrade; else echo --no-deps; fi; }

main "$@"
