#!/bin/sh
# Install versitygw, the real S3 server of the storage tests, into .cache/bin of this checkout. Does nothing when it is there.
# scripts/install_go.sh finds or installs the Go it needs.
set -eu

version=v1.8.0
root=$(cd "$(dirname "$0")/.." && pwd)
bin="$root/.cache/bin"
stamp="$bin/.versitygw-version"

if [ -x "$bin/versitygw" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
    echo "$bin/versitygw"
    exit 0
fi

go=$("$root/scripts/install_go.sh")
mkdir -p "$bin"
GOBIN="$bin" GOTOOLCHAIN=auto "$go" install "github.com/versity/versitygw/cmd/versitygw@$version" >&2
echo "$version" > "$stamp"
echo "$bin/versitygw"
