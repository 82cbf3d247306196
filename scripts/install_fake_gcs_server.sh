#!/bin/sh
# Install fake-gcs-server, the Google Cloud Storage server of the storage tests, into .cache/bin of this checkout. Does nothing when
# it is there. scripts/install_go.sh finds or installs the Go it needs.
set -eu

version=v1.56.1
root=$(cd "$(dirname "$0")/.." && pwd)
bin="$root/.cache/bin"
stamp="$bin/.fake-gcs-server-version"

if [ -x "$bin/fake-gcs-server" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
    echo "$bin/fake-gcs-server"
    exit 0
fi

go=$("$root/scripts/install_go.sh")
mkdir -p "$bin"
GOBIN="$bin" GOTOOLCHAIN=auto "$go" install "github.com/fsouza/fake-gcs-server@$version" >&2
echo "$version" > "$stamp"
echo "$bin/fake-gcs-server"
