#!/bin/sh
# Install versitygw, the real S3 server of the storage tests, into .cache/bin of this checkout. Does nothing when it is there.
# Needs Go (GO may name the program); as root on Debian or Ubuntu Go is installed too.
set -eu

version=v1.8.0
root=$(cd "$(dirname "$0")/.." && pwd)
bin="$root/.cache/bin"
stamp="$bin/.versitygw-version"

if [ -x "$bin/versitygw" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
    echo "$bin/versitygw"
    exit 0
fi

go=${GO:-$(command -v go || echo /usr/local/go/bin/go)}
if ! command -v "$go" >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends golang-go ca-certificates >&2
        go=$(command -v go)
    else
        echo "install_versitygw.sh: Go is missing: install it (https://go.dev/dl, or golang-go) and run this again" >&2
        exit 1
    fi
fi

mkdir -p "$bin"
GOBIN="$bin" GOTOOLCHAIN=auto "$go" install "github.com/versity/versitygw/cmd/versitygw@$version" >&2
echo "$version" > "$stamp"
echo "$bin/versitygw"
