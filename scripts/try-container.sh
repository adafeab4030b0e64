#!/usr/bin/env bash
# Builds the container image for a CPU and runs the doctor and the demo in it.
#
# ENGINE is podman, docker or buildah; default: the first that works. buildah needs no daemon, and with
# BUILDAH_ISOLATION=chroot no namespaces. If none works, the script checks what is possible without one:
# that files for COPY exist, that hadolint (if installed) has no complaints, and with CLEAN=1 the commands of
# the build stage, except apt-get, in a clean clone, and the doctor and the demo of the result. Either
# takes as long as a first build.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/try.sh

main() {
  local engine=${ENGINE:-}
  for candidate in podman docker buildah; do
    [ -z "$engine" ] && "$candidate" info >/dev/null 2>&1 && engine=$candidate
  done
  if [ -n "$engine" ]; then
    build_and_run "$engine"
    return
  fi
  echo "skipped: neither podman nor docker nor buildah can build here; the image is not built"
  check_copies
  if command -v hadolint >/dev/null; then
    # Packages come in the versions of the base images.
    hadolint --ignore DL3008 Containerfile && echo "container: hadolint finds nothing"
  else
    echo "skipped: hadolint is not installed"
  fi
  if [ -n "${CLEAN:-}" ]; then run_build_stage; else echo "skipped: the commands of the build stage (CLEAN=1 runs them)"; fi
}

build_and_run() {
  "$1" build -f Containerfile -t dflash-try .
  local run=("$1" run --rm dflash-try)
  if [ "$1" = buildah ]; then
    local container
    container=$(buildah from dflash-try)
    # buildah's containers need names, and its run ignores the entrypoint.
    # shellcheck disable=SC2064  # expand the name now
    trap "buildah rm '$container' >/dev/null; rm -rf '$scratch'" EXIT
    run=(buildah run "$container" -- dflash)
  fi
  "${run[@]}" doctor --offline
  "${run[@]}" demo --quick | grep 'acceptance length'
  echo "container: doctor and demo are fine"
}

# Sources of COPY from the build's context.
check_copies() {
  local sources
  sources=$(sed -n '/--from=/d; s/^COPY \(.*\) [^ ]*$/\1/p' Containerfile)
  [ -n "$sources" ] || fail "the Containerfile copies nothing"
  for source in $sources; do
    [ -e "$source" ] || fail "COPY takes $source, which is not there"
  done
  echo "container: what COPY takes is there"
}

# Commands of the build stage's RUN lines, joined, without those of the distribution.
build_commands() {
  sed -n '/ AS build$/,/^FROM/p' Containerfile | sed -e ':join' -e '/\\$/{N;s/\\\n//;b join' -e '}' |
    sed -n 's/^RUN //p' | grep -v '^apt-get'
}

run_build_stage() {
  git clone --quiet . "$scratch/src"
  local prefix=$scratch/prefix
  build_commands | sed "s|/prefix|$prefix|g" >"$scratch/commands"
  [ "$(wc -l <"$scratch/commands")" -ge 3 ] || fail "the build stage has too few commands"
  (cd "$scratch/src" && env -u DFLASH_LIBTORCH -u LIBTORCH bash -euxo pipefail "$scratch/commands")
  LIBTORCH_GIVEN=$prefix/lib/libtorch/torch
  try_programs "the image's files" "$prefix/bin" "$prefix"
}

main
