#!/usr/bin/env bash
# Write constraints.txt from what is installed in .venv, name and version only, and from it the files of requirements/, with the hash of each file
# that a version consists of. No address is written: any index that has these files will do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
    echo "# What the tests ran with, for pip install -c constraints.txt. Written by scripts/freeze.sh."
    .venv/bin/pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==[^ ]+$' | sort -f
} >constraints.txt

# lock NAME ARGUMENT...: write requirements/NAME.txt, for Python 3.11 and newer.
lock() {
    local name=$1
    shift
    {
        echo "# For pip install --require-hashes. Written by scripts/freeze.sh."
        .venv/bin/uv pip compile --quiet --universal --python-version 3.11.7 --generate-hashes --no-header --no-annotate \
            --constraints constraints.txt "$@"
    } >"requirements/$name.txt"
}

mkdir -p requirements
# Packages without a wheel, as PySpark, are built with these, too: pip would fetch others for each, and check no hash.
lock build - <<<$'hatchling\neditables\nsetuptools\nwheel'
# Compiles the C extension of the kernels for Dockerfile.core.
lock kernels - <<<$'llvmlite\nnumba'
lock core pyproject.toml --extra aws
lock image pyproject.toml --extra full --extra playground --extra kafka
lock dev pyproject.toml --extra dev
