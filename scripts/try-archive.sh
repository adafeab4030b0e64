#!/usr/bin/env bash
# Unpacks the archive of dist/ under a fresh prefix and tries its programs, completions and man pages.
# libtorch is the one that DFLASH_LIBTORCH names, by default .deps/libtorch.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/try.sh

archives=(dist/dflash-*.tar.gz)
[ -f "${archives[0]}" ] || fail "no archive in dist/; run 'make archive'"
(cd dist && sha256sum --quiet --check "$(basename "${archives[0]}").sha256")
prefix=$scratch/prefix
mkdir "$prefix"
tar -xzf "${archives[0]}" -C "$prefix" --strip-components=1

must_miss_libtorch "$prefix/bin"
LIBTORCH_GIVEN=$(realpath "${DFLASH_LIBTORCH:-.deps/libtorch}")
try_programs archive "$prefix/bin" "$(dirname "$LIBTORCH_GIVEN")"

# Bash's completions for `dflash tr`.
offered=$(bash -c 'source "$1"; COMP_WORDS=(dflash tr); COMP_CWORD=1; COMP_LINE="dflash tr"
  _dflash dflash tr dflash; echo "${COMPREPLY[*]}"' - "$prefix/share/bash-completion/completions/dflash")
[ "$offered" = train ] || fail "Bash offers '$offered' behind 'dflash tr'"
for file in zsh/site-functions/_dflash fish/vendor_completions.d/dflash.fish; do
  grep -q hidden-server "$prefix/share/$file" || fail "$file does not know hidden-server"
done
if command -v zsh >/dev/null; then zsh -n "$prefix/share/zsh/site-functions/_dflash"; fi

pages=0
for command in $(alone "$prefix/bin" dflash --help | sed -n '/^Commands:/,/^$/s/^  \([a-z-]*\) .*/\1/p'); do
  page=$prefix/share/man/man1/dflash-$command.1
  [ -s "$page" ] || fail "no man page of dflash $command"
  if command -v man >/dev/null; then
    MANPAGER="cat" man --local-file "$page" 2>/dev/null | grep -q . || fail "$page is not a man page"
  fi
  pages=$((pages + 1))
done
[ "$pages" -ge 10 ] || fail "only $pages man pages"
echo "archive: $(stat -c %s "${archives[0]}" | awk '{ printf "%.1f", $1 / 1e6 }') MB, $pages man pages, completions"
