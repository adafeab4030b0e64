#!/usr/bin/env bash
# Installs the Hub's official Python client from PyPI and prints its interpreter: tests read back with it
# what `dflash push` published. HUB_CLIENT names another directory for it.
set -euo pipefail

version=1.33.0
dir=${HUB_CLIENT:-${XDG_CACHE_HOME:-$HOME/.cache}/dflash/hub-client-$version}

if ! "$dir/bin/python" -c "import huggingface_hub as h; assert h.__version__ == '$version'" 2>/dev/null; then
  python3 -m venv "$dir" >&2
  "$dir/bin/pip" install --quiet --disable-pip-version-check "huggingface_hub==$version" >&2
fi
echo "$dir/bin/python"
