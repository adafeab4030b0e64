#!/usr/bin/env bash
# Builds the container image for a CPU from the wheel in dist/ and runs the doctor and the demo in it, as the
# image's user.
#
# ENGINE is podman, docker or buildah; default: the first that works. buildah needs no daemon, and with
# BUILDAH_ISOLATION=chroot no namespaces. BASE names another base image. If none works, the script checks what
# is possible without one: that files for COPY exist, that hadolint (if installed) has no complaints, and that
# the commands of the first stage, except apt-get, make a prefix where the doctor and the demo run.
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
  run_first_stage
}

build_and_run() {
  "$1" build -f Containerfile ${BASE:+--build-arg "BASE=$BASE"} -t dflash-try .
  local run=("$1" run --rm --entrypoint "" dflash-try)
  if [ "$1" = buildah ]; then
    local container
    container=$(buildah from dflash-try)
    # buildah's containers need names, and its run ignores the entrypoint.
    # shellcheck disable=SC2064  # expand the name now
    trap "buildah rm '$container' >/dev/null; rm -rf '$scratch'" EXIT
    run=(buildah run "$container" --)
  fi
  [ "$("${run[@]}" id -u)" = 1000 ] || fail "the image does not run as its own user"
  local program
  for program in dflash dflash-train; do "${run[@]}" "$program" doctor --offline; done
  # Writes in the working directory.
  "${run[@]}" dflash demo --quick | grep 'acceptance length'
  echo "container: user, doctor and demo are fine"
}

# Sources of COPY from the build's context.
check_copies() {
  local sources
  sources=$(sed -n '/--from=/d; s/^COPY \(.*\) [^ ]*$/\1/p' Containerfile)
  [ -n "$sources" ] || fail "the Containerfile copies nothing"
  for source in $sources; do
    compgen -G "$source" >/dev/null || fail "COPY takes $source, which is not there; run 'make wheel'"
  done
  echo "container: what COPY takes is there"
}

# Commands of the first stage's RUN lines, joined, without those of the distribution.
first_stage() {
  sed -n '/ AS install$/,/^FROM/p' Containerfile | sed -e '/^#/d' -e ':join' -e '/\\$/{N;s/\\\n//;b join' -e '}' |
    sed -n 's/^RUN //p' | grep -v '^apt-get'
}

run_first_stage() {
  local prefix=$scratch/prefix
  first_stage | sed "s|/opt/dflash|$prefix|g; s|/dist/|$PWD/dist/|g" >"$scratch/commands"
  [ "$(wc -l <"$scratch/commands")" -ge 3 ] || fail "the first stage has too few commands"
  CUDA=0 bash -euxo pipefail "$scratch/commands"
  try_programs "the image's files" "$prefix/bin" "$prefix"
}

main
