#!/usr/bin/env bash
# Build the sdist and the wheel of a release, and check them: `twine check`, what they contain, and that a second build is the same.
#
#   scripts/build_release.sh [DIR]     into DIR (default: dist), which must not contain other files
#
# The wheel is made from the sdist, so it has no machine code of this computer, and runs wherever its dependencies do.
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
trap 'rm -rf "$again"' EXIT

say "building"
"$python" -m build --no-isolation --outdir "$target" . >/dev/null
say "building again, to compare"
"$python" -m build --no-isolation --outdir "$again" . >/dev/null
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
    if path.endswith(".whl"):
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
        wrong = [name for name in names if not name.startswith(("tikv_br/", "tikv_br-"))]
        wanted = ["tikv_br/formats/columns.py", "tikv_br/incremental/sync.py", "tikv_br/incremental/watch/page.html", "tikv_br/py.typed"]
    else:
        with tarfile.open(path) as sdist:
            names = [name.partition("/")[2] for name in sdist.getnames()]
        wrong = [name for name in names if name.startswith(("tests", "bench", ".venv", ".cache", "dist"))]
        wanted = ["formats/columns.py", "incremental/sync.py", "tikv_br/__init__.py", "docs/README.md", "LICENSE"]
    wrong += [name for name in names if "golden" in name or "compiled/" in name or name.endswith(".pyc")]
    missing = [name for name in wanted if name not in names]
    if wrong or missing:
        sys.exit(f"error: {path}: must not contain {wrong[:5]}, lacks {missing}")
    print(f"{path}: {len(names)} files")
PYTHON
