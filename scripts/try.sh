# shellcheck shell=bash
# Shared by the scripts that try an installation: a scratch directory, and running programs in a minimal
# environment.

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() { echo "$(basename "$0" .sh): $*" >&2; exit 1; }

# alone BIN COMMAND...: without the user's settings, caches and other programs.
alone() {
  local bin=$1
  shift
  mkdir -p "$scratch/home"
  (cd "$scratch" && env -i HOME="$scratch/home" PATH="$bin:/usr/bin:/bin" TMPDIR="$scratch" \
    ${LIBTORCH_GIVEN:+DFLASH_LIBTORCH="$LIBTORCH_GIVEN"} "$@")
}

# must_miss_libtorch BIN [PROGRAM]
must_miss_libtorch() {
  local said status=0
  said=$(alone "$1" "${2:-dflash}" doctor --offline 2>&1) || status=$?
  [ "$status" -eq 1 ] || fail "the doctor ended with $status without libtorch: $said"
  grep -q '^MISSING *libtorch' <<<"$said" || fail "the doctor does not miss libtorch: $said"
  grep -q 'pip install torch==2.11' <<<"$said" || fail "the doctor names no remedy: $said"
}

# try_programs NAME BIN LIB: LIB is where libtorch must be from.
try_programs() {
  local name=$1 bin=$2 lib=$3 doctor began=$SECONDS
  alone "$bin" dflash --version
  alone "$bin" dflash-train --version
  alone "$bin" dflash recipes "$scratch/files" >/dev/null
  [ -s "$scratch/files/data/sharegpt_sample.json" ] && [ -x "$scratch/files/recipes/run.sh" ] ||
    fail "$name: dflash recipes wrote no sample or no recipes"
  doctor=$(alone "$bin" dflash doctor --offline) || fail "$name: the doctor says: $doctor"
  grep -qE "^ok +libtorch +2\.11\.[^ ]* at $(realpath "$lib")/" <<<"$doctor" ||
    fail "$name: libtorch is not that of $lib: $doctor"
  grep -qE '^ok +engine ' <<<"$doctor" || fail "$name: the engine does not start: $doctor"
  alone "$bin" dflash demo --quick --fresh --dir "$scratch/demo" >"$scratch/table" 2>"$scratch/said" ||
    fail "$name: the demo failed: $(tail -n5 "$scratch/said")"
  grep -q 'acceptance length' "$scratch/table" || fail "$name: no table: $(cat "$scratch/table")"
  echo "$name: doctor and demo are fine ($((SECONDS - began)) s)"
}
