#!/usr/bin/env bash
# llama.cpp's server on a CPU, built from the source in llama-cpp-python on PyPI.
#
#   scripts/engines/llama_cpp.sh install                    fetches 80 MB and builds, half an hour on two cores; a later
#                                                           call finds it
#   scripts/engines/llama_cpp.sh convert TARGET DRAFT DIR   DIR/target.gguf and DIR/draft.gguf, by its own converter
#   scripts/engines/llama_cpp.sh serve DIR PORT [FLAG...]   serves them until it is ended
#
# LLAMA_CPP_DIR is where it lies (default: ~/.cache/dflash-llama-cpp); OUTTYPE the converter's type (bf16); PLAIN=1
# serves without the drafter; THREADS (2). LEVEL (baseline, avx2, avx512) builds another one with the processor's
# instructions up to that level, beside the first, which has all. LLAMA_CPP_PRE names the kind of a tokenizer that the
# converter does not know.
set -euo pipefail

readonly version=0.3.36
readonly dir=${LLAMA_CPP_DIR:-$HOME/.cache/dflash-llama-cpp}${LEVEL:+-$LEVEL}
readonly server=$dir/build/bin/llama-server
readonly here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# CMake's switches for a level.
instructions() {
  local avx2=(SSE42 AVX AVX2 FMA F16C BMI2) on=() name
  case ${LEVEL:-} in
    '') echo -DGGML_NATIVE=ON && return ;;
    baseline) ;;
    avx2) on=("${avx2[@]}") ;;
    avx512) on=("${avx2[@]}" AVX512) ;;
    *) echo "llama_cpp.sh: no level $LEVEL; there are baseline, avx2 and avx512" >&2 && exit 2 ;;
  esac
  echo -DGGML_NATIVE=OFF
  for name in "${avx2[@]}" AVX512; do
    [[ " ${on[*]} " == *" $name "* ]] && echo "-DGGML_$name=ON" || echo "-DGGML_$name=OFF"
  done
}

install() {
  "$server" --version >/dev/null 2>&1 && return
  local switches fetched
  switches=$(instructions)
  echo "llama_cpp.sh: building llama.cpp in $dir" >&2
  python3 -m venv "$dir/venv"
  "$dir/venv/bin/pip" install --quiet cmake ninja sentencepiece >&2
  fetched=$(mktemp -d)
  "$dir/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$fetched" "llama-cpp-python==$version" >&2
  rm -rf "$dir/src" && mkdir -p "$dir/src"
  tar -xzf "$fetched"/*.tar.gz -C "$dir/src" --strip-components=3 --wildcards '*/vendor/llama.cpp'
  rm -rf "$fetched"
  # Only the server, which needs no network.
  local name
  for name in BUILD_SHARED_LIBS LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_APP LLAMA_BUILD_UI \
    LLAMA_USE_PREBUILT_UI LLAMA_OPENSSL GGML_OPENMP; do
    switches+=" -D$name=OFF"
  done
  logged cmake -S "$dir/src" -B "$dir/build" -G Ninja -DCMAKE_BUILD_TYPE=Release $switches
  logged nice cmake --build "$dir/build" --target llama-server --parallel "${JOBS:-2}"
}

logged() {
  PATH=$dir/venv/bin:$PATH "$@" >"$dir/build.log" 2>&1 || { tail -n 20 "$dir/build.log" >&2; exit 1; }
}

convert() {
  local python type=${OUTTYPE:-bf16}
  python=$(bash "$here/python.sh")
  mkdir -p "$3"
  # The converter's own package, and sentencepiece, which only it needs.
  local path
  path=$dir/src:$dir/src/gguf-py:$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  PYTHONPATH=$path "$python" "$here/llama_cpp_convert.py" "$dir/src" "$1" --outtype "$type" --outfile "$3/target.gguf"
  PYTHONPATH=$path "$python" "$here/llama_cpp_convert.py" "$dir/src" "$2" --target-model-dir "$1" --outtype "$type" \
    --outfile "$3/draft.gguf"
}

case "${1:-}:$#" in
  install:1) install ;;
  convert:4) install && convert "${@:2}" ;;
  serve:*)
    install
    models=$2 port=$3
    shift 3
    drafter=(-md "$models/draft.gguf" --spec-type draft-dflash --spec-draft-n-max 64)
    [ -z "${PLAIN:-}" ] || drafter=()
    # Without busy waiting, since spinning threads would take cores from others.
    exec "$server" -m "$models/target.gguf" "${drafter[@]}" --host 127.0.0.1 --port "$port" --jinja --metrics \
      --parallel 1 --threads "${THREADS:-2}" --poll 0 --poll-batch 0 --spec-draft-poll 0 --spec-draft-poll-batch 0 "$@"
    ;;
  *)
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
