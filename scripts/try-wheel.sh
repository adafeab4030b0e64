#!/usr/bin/env bash
# Installs the wheel of dist/ with pip, uv and pipx, each in a fresh environment, and runs the programs:
# version, doctor, demo. An installer that is not available is skipped with a message. `neighbour` installs it
# beside the package `dflash` of PyPI, whose program has the same name, in both orders.
#
#   scripts/try-wheel.sh [INSTALLER|neighbour...]
#
# On a machine without GPU torch comes without CUDA's libraries; FULL=1 takes them, over 5 GB each.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/try.sh

readonly cpu=("torch==2.11.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*")
light=yes
if [ -e /dev/nvidiactl ] || [ -n "${FULL:-}" ]; then light=; fi

main() {
  local wheels=(dist/dflash_train-*.whl)
  [ -f "${wheels[0]}" ] || fail "no wheel in dist/; run 'make wheel'"
  wheel=$(realpath "${wheels[0]}")
  python=${PYTHON:-python3}
  interpreter=$("$python" -c 'import sys; print(sys.executable)')
  check_contents
  [ $# -gt 0 ] || set -- neighbour pip uv pipx
  for installer in "$@"; do
    case $installer in neighbour | pip | uv | pipx) ;; *) fail "no installer $installer; there are pip, uv, pipx" ;; esac
    if [ "$installer" = neighbour ]; then
      try_neighbour
    elif [ "$installer" != pip ] && ! command -v "$installer" >/dev/null; then
      echo "skipped: $installer is not installed"
    elif [ "$installer" = pipx ] && [ -n "$light" ]; then
      echo "skipped: pipx, which cannot leave CUDA's libraries out; FULL=1 tries it"
    else
      "try_$installer"
    fi
  done
}

# The programs and their names, the dependency, the version of Cargo.toml, the oldest glibc.
check_contents() {
  local version
  version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
  "$python" - "$wheel" "$version" <<'P' || fail "$wheel is not what it should be"
import email, sys, zipfile
wheel, version = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
scripts = {name.rsplit("/", 1)[1]: name for name in wheel.namelist() if "/scripts/" in name}
assert set(scripts) == {"dflash", "dflash-train", "dflash-engine"}, scripts
assert wheel.getinfo(scripts["dflash"]).file_size < 1000, "dflash is not a launcher"
for name in scripts.values():
    assert wheel.getinfo(name).external_attr >> 16 & 0o111, f"{name} is not executable"
meta = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))))
assert (meta["Name"], meta["Version"]) == ("dflash-train", version), meta["Name"]
assert meta.get_all("Requires-Dist") == ["torch==2.11.*"], meta.get_all("Requires-Dist")
tag = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("/WHEEL"))))["Tag"]
glibc = int(tag.removeprefix("py3-none-manylinux_2_").split("_")[0])
assert glibc <= 34, f"{tag}: RHEL 9 and Amazon Linux 2023 have glibc 2.34"
print(f"{wheel.filename.rsplit('/', 1)[1]}: {sum(i.compress_size for i in wheel.infolist()) / 1e6:.1f} MB, {tag}")
P
}

# In both orders, and after either is uninstalled: `dflash-train` is always ours, and `import dflash` theirs.
# The program `dflash` is that of the package installed last, and is lost when either is uninstalled.
try_neighbour() {
  local theirs=$scratch/theirs first
  "$python" -m pip --disable-pip-version-check download --quiet --no-deps --dest "$theirs" dflash==0.1.0 2>"$scratch/said" || {
    echo "skipped: PyPI's package dflash, which cannot be fetched: $(tail -n1 "$scratch/said")"
    return
  }
  for first in ours theirs; do try_beside "$first" "$(echo "$theirs"/*.whl)"; done
  echo "neighbour: dflash-train runs beside PyPI's dflash $(sed 's/.*dflash-\([0-9.]*\)-.*/\1/' <<<"$(echo "$theirs"/*.whl)"), in both orders"
}

# try_beside FIRST THEIRS
try_beside() {
  local env bin
  env=$(mktemp -d -p "$scratch")
  bin=$env/bin
  "$python" -m venv "$env"
  local pip=("$bin/pip" --disable-pip-version-check --quiet)
  case $1 in
    ours) "${pip[@]}" install --no-deps "$wheel" && "${pip[@]}" install --no-deps "$2" ;;
    theirs) "${pip[@]}" install --no-deps "$2" && "${pip[@]}" install --no-deps "$wheel" ;;
  esac
  must_be_ours "$bin" dflash-train
  must_import_theirs "$bin"
  case $1 in
    ours) must_be_theirs "$bin" && "${pip[@]}" uninstall --yes dflash ;;
    theirs) must_be_ours "$bin" dflash && "${pip[@]}" uninstall --yes dflash-train ;;
  esac
  [ ! -e "$bin/dflash" ] || fail "$1 first: pip left $bin/dflash"
  case $1 in
    ours) must_be_ours "$bin" dflash-train ;;
    theirs) must_import_theirs "$bin" ;;
  esac
}

must_be_ours() {
  local said
  said=$(alone "$1" "$2" --help) || fail "$2 --help failed: $said"
  grep -q "^Usage: $2 " <<<"$said" || fail "$2 is not ours, or shows another name: $said"
  must_miss_libtorch "$1" "$2"
}

must_be_theirs() { grep -q 'from dflash.cli import' "$1/dflash" || fail "$1/dflash is not PyPI's"; }

must_import_theirs() {
  alone "$1" "$1/python" -c 'import importlib.metadata, importlib.util
assert importlib.metadata.version("dflash") == "0.1.0"
assert importlib.util.find_spec("dflash.model").origin.endswith("dflash/model.py")' || fail "import dflash is not PyPI's"
}

try_pip() {
  local env=$scratch/pip
  "$python" -m venv "$env"
  local pip=("$env/bin/pip" --disable-pip-version-check install --quiet)
  # Without torch the doctor must report it missing.
  "${pip[@]}" --no-deps "$wheel"
  must_miss_libtorch "$env/bin"
  if [ -n "$light" ]; then "${pip[@]}" --no-deps "${cpu[@]}"; else "${pip[@]}" "$wheel"; fi
  try_programs pip "$env/bin" "$env/lib"
}

# Leaves out dependencies whose marker never applies.
leave_out_cuda() {
  uv --quiet pip compile --no-header --no-annotate --python-version 3.12 - <<<"torch==2.11.*" |
    sed -n 's/^\(nvidia-[^=]*\|triton\)==.*/\1; python_version < "0"/p' |
    grep -vE '^nvidia-cuda-(runtime|cupti);' >"$scratch/overrides.txt"
  overrides=(--overrides "$scratch/overrides.txt")
}

try_uv() {
  export UV_TOOL_DIR=$scratch/uv/tools UV_TOOL_BIN_DIR=$scratch/uv/bin
  local overrides=()
  if [ -n "$light" ]; then leave_out_cuda; fi
  uv --quiet tool install --python "$interpreter" "${overrides[@]}" "$wheel"
  try_programs "uv tool" "$UV_TOOL_BIN_DIR" "$UV_TOOL_DIR"
}

try_pipx() {
  export PIPX_HOME=$scratch/pipx PIPX_BIN_DIR=$scratch/pipx/bin PIPX_MAN_DIR=$scratch/pipx/man
  pipx install --quiet --python "$interpreter" "$wheel" >/dev/null
  try_programs pipx "$PIPX_BIN_DIR" "$PIPX_HOME"
}

main "$@"
