#!/usr/bin/env bash
# A Python with Transformers and speculators, in its own virtual environment, for comparisons with their
# code. Prints the interpreter's path; PYREF_DIR is where it lies (default: ~/.cache/dflash-pyref).
set -euo pipefail

readonly dir=${PYREF_DIR:-$HOME/.cache/dflash-pyref}
readonly packages=(
  torch==2.11.0 transformers==5.17.0 safetensors numpy "datasets<=5.1.0" pyarrow
  # What speculators imports; its own list pins more than its models need.
  openai typer psutil pydantic pydantic-settings loguru aiohttp httpx rich
)

if ! "$dir/bin/python" -c 'import transformers, speculators.models.dflash' 2>/dev/null; then
  echo "python.sh: installing Transformers and speculators into $dir" >&2
  python3 -m venv "$dir"
  "$dir/bin/pip" install --quiet "${packages[@]}" >&2
  "$dir/bin/pip" install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 >&2
fi
echo "$dir/bin/python"
