#!/usr/bin/env bash
# Build the sdists and the wheels of a release, tikv-br-core and tikv-br (deploy/whole), and check them: `twine check`, what they contain, and that a second build is the same.
#
#   scripts/build_release.sh [DIR]     into DIR (default: dist), which must not contain other files
#
# The wheel is made from the sdist and the extension with the kernels, for any processor of this architecture and this Python, which takes
# compilers of C and C++. Elsewhere it needs numba, which compiles them at their first use, and keeps them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${1:-dist}
python=.venv/bin/python

say() { printf '==> %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

"$python" -c 'import build, hatchling, twine' 2>/dev/null || scripts/setup.sh dev
mkdir -p "$target"
[ -z "$(ls -A "$target")" ] || fail "$target is not empty: remove old releases first"
again=$(mktemp -d)
unpacked=$(mktemp -d)
trap 'rm -rf "$again" "$unpacked"' EXIT

build() { # into DIR
    "$python" -m build --no-isolation --sdist --outdir "$1" . >/dev/null
    rm -rf "${unpacked:?}/source"
    mkdir "$unpacked/source"
    tar xzf "$1"/tikv_br_core-*.tar.gz -C "$unpacked/source" --strip-components=1
    cp -r formats/compiled "$unpacked/source/formats/"
    "$python" -m build --no-isolation --wheel --outdir "$1" "$unpacked/source" >/dev/null
    "$python" -m build --no-isolation --outdir "$1" deploy/whole >/dev/null
}

say "compiling kernels, unless that was done"
"$python" -m tikv_br.formats.precompile --extension
say "building"
build "$target"
say "building again, to compare"
build "$again"
for file in "$again"/*; do
    cmp "$file" "$target/$(basename "$file")" || fail "two builds differ: $(basename "$file")"
done

say "checking metadata and contents"
"$python" -m twine check --strict "$target"/* >&2
"$python" - "$target"/* <<'PYTHON'
import sys
import tarfile
import zipfile

for path in sys.argv[1:]:
    if "/tikv_br_core-" not in path:  # has metadata only
        continue
    if path.endswith(".whl"):
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
        wrong = [name for name in names if not name.startswith(("tikv_br/", "tikv_br_core-"))]
        compiled = [name for name in names if name.startswith("tikv_br/formats/compiled/")]
        if len(compiled) != 1 or not compiled[0].endswith(".so"):
            sys.exit(f"error: {path} must have one extension with the kernels: {compiled}")
        wanted = ["tikv_br/formats/columns.py", "tikv_br/incremental/sync.py", "tikv_br/serve/pages/overview.html", "tikv_br/py.typed"]
    else:
        with tarfile.open(path) as sdist:
            names = [name.partition("/")[2] for name in sdist.getnames()]
        wrong = [name for name in names if name.startswith(("tests", "bench", ".venv", ".cache", "dist")) or "compiled/" in name]
        wanted = ["formats/columns.py", "incremental/sync.py", "tikv_br/__init__.py", "docs/README.md", "LICENSE"]
    wrong += [name for name in names if "golden" in name or name.endswith(".pyc")]
    missing = [name for name in wanted if name not in names]
    if wrong or missing:
        sys.exit(f"error: {path}: must not contain {wrong[:5]}, lacks {missing}")
    print(f"{path}: {len(names)} files")
PYTHON
