#!/usr/bin/env bash
# Installs the wheel of dist/ with pip, uv and pipx, each in a fresh environment, and runs the programs:
# version, doctor, demo. An installer that is not available is skipped with a message.
#
#   scripts/try-wheel.sh [INSTALLER...]
#
# On a machine without GPU torch comes without CUDA's libraries; FULL=1 takes them, over 5 GB each.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/try.sh

readonly cpu=("torch==2.11.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*")
light=yes
if [ -e /dev/nvidiactl ] || [ -n "${FULL:-}" ]; then light=; fi

main() {
  local wheels=(dist/dflash-*.whl)
  [ -f "${wheels[0]}" ] || fail "no wheel in dist/; run 'make wheel'"
  wheel=$(realpath "${wheels[0]}")
  python=${PYTHON:-python3}
  interpreter=$("$python" -c 'import sys; print(sys.executable)')
  check_contents
  [ $# -gt 0 ] || set -- pip uv pipx
  for installer in "$@"; do
    case $installer in pip | uv | pipx) ;; *) fail "no installer $installer; there are pip, uv, pipx" ;; esac
    if [ "$installer" != pip ] && ! command -v "$installer" >/dev/null; then
      echo "skipped: $installer is not installed"
    elif [ "$installer" = pipx ] && [ -n "$light" ]; then
      echo "skipped: pipx, which cannot leave CUDA's libraries out; FULL=1 tries it"
    else
      "try_$installer"
    fi
  done
}

# Both programs, the dependency, the version of Cargo.toml.
check_contents() {
  local version
  version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
  "$python" - "$wheel" "$version" <<'P' || fail "$wheel is not what it should be"
import email, sys, zipfile
wheel, version = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
scripts = {name.rsplit("/", 1)[1]: name for name in wheel.namelist() if "/scripts/" in name}
assert set(scripts) == {"dflash", "dflash-engine"}, scripts
for name in scripts.values():
    assert wheel.getinfo(name).external_attr >> 16 & 0o111, f"{name} is not executable"
meta = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))))
assert meta["Version"] == version, meta["Version"]
assert meta.get_all("Requires-Dist") == ["torch==2.11.*"], meta.get_all("Requires-Dist")
tag = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("/WHEEL"))))["Tag"]
assert tag.startswith("py3-none-manylinux_2_"), tag
print(f"{wheel.filename.rsplit('/', 1)[1]}: {sum(i.compress_size for i in wheel.infolist()) / 1e6:.1f} MB, {tag}")
P
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
