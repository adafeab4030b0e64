#!/bin/sh
# Runs a program with the project's libtorch on the library path; cargo's runner for tests and
# programs of the workspace.
here=$(cd "$(dirname "$0")/.." && pwd)
LD_LIBRARY_PATH="$here/.deps/libtorch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$@"
