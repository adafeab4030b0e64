#!/usr/bin/env bash
# Checks `dflash serve` with the official `openai` client: answers, streams, logprobs, errors, and the
# metrics page with promtool if it is installed, else with Prometheus' own parser.
#
#   TARGET=DIR DRAFT=DIR scripts/openai_client.sh
#
# Defaults: the demo's files in demo-run; DRAFT= serves the target alone. The client is installed from PyPI
# into a virtual environment under target/; without PyPI, or without Python, nothing is checked and the
# script says so.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${TARGET:-demo-run/target}
draft=${DRAFT-demo-run/drafts}
venv=${VENV:-target/openai-venv}
program=${DFLASH:-target/release/dflash}
key=sk-only-for-this-check

[ -f "$target/config.json" ] || { echo "openai_client: no target at $target; run 'make demo' or set TARGET" >&2; exit 1; }
if ! "$venv/bin/python" -c 'import openai, prometheus_client' 2>/dev/null; then
  python3 -m venv "$venv" && "$venv/bin/pip" install --quiet openai prometheus_client ||
    { echo "skipped: the openai client cannot be installed from PyPI" >&2; exit 0; }
fi

work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT
DFLASH_API_KEY=$key "$program" -vv serve --target "$target" ${draft:+--draft "$draft"} \
  --served-model-name served --port 0 --port-file "$work/port" 2>"$work/log" &
server=$!
for _ in $(seq 600); do
  [ -s "$work/port" ] && break
  kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
  sleep 0.1
done
"$venv/bin/python" scripts/openai_client.py "http://127.0.0.1:$(cat "$work/port")" "$key" "$work/log"
kill "$server"
wait "$server"
echo "ok   the server drains and ends with 0"
