#!/usr/bin/env bash
# Builds the Python wheel into dist/: the programs, torch as a dependency. Needs Python 3.11 and binutils.
#
# The wheel's tag names the oldest glibc that it runs on. The build fails if that is newer than RHEL 9's, or
# if the programs need a newer libstdc++ than RHEL 9 has.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "wheel: $*" >&2; exit 1; }

python=${PYTHON:-python3}
for tool in objdump strip; do
  command -v "$tool" >/dev/null || fail "$tool is missing; install binutils"
done
"$python" -c 'import tomllib' 2>/dev/null || fail "$python is missing or older than 3.11; PYTHON names another"
rm -f dist/dflash*.whl
"$python" scripts/wheel_backend.py
