#!/usr/bin/env bash
# Packs a release archive into dist/: both programs, completions, man pages, licence, and its
# SHA-256. The same programs and commit give the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly dflash=target/release/dflash
[ -x "$dflash" ] && [ -x "$dflash-engine" ] ||
  { echo "archive: the programs are missing; run 'make archive' or 'make build'" >&2; exit 1; }

version=$("$dflash" --version | cut -d' ' -f2)
name=dflash-$version-$(rustc -vV | sed -n 's/^host: //p')
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
root=$scratch/$name

mkdir -p "$root"/{bin,share/man/man1,share/doc/dflash}
for program in dflash dflash-engine; do
  strip -o "$root/bin/$program" "target/release/$program"
done
# The second name that the wheel has too.
ln -s dflash "$root/bin/dflash-train"
"$dflash" man "$root/share/man/man1" >/dev/null
completions() { mkdir -p "$root/share/$2"; "$dflash" completions "$1" >"$root/share/$2/$3"; }
completions bash bash-completion/completions dflash
completions zsh zsh/site-functions _dflash
completions fish fish/vendor_completions.d dflash.fish
cp LICENSE README.md CHANGELOG.md "$root/share/doc/dflash/"
chmod -R u=rwX,go=rX "$root"
chmod 755 "$root"/bin/*

# Time of the last commit, or of the sources without a repository.
when=$(git log -1 --format=%ct 2>/dev/null || date -r Cargo.toml +%s)
mkdir -p dist
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$when" -C "$scratch" -cf - "$name" |
  gzip -n9 >"$scratch/archive"
mv "$scratch/archive" "dist/$name.tar.gz"
(cd dist && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
echo "dist/$name.tar.gz"
