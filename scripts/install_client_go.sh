#!/bin/sh
# Build tests/interop/client_go, the tests' client in Go, of RawKV and of transactions, into .cache/bin of this checkout. Does nothing when it is there.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
source="$root/tests/interop/client_go"
bin="$root/.cache/bin"
stamp="$bin/.client_go-sources"
wanted=$(cat "$source/go.mod" "$source/go.sum" "$source/main.go" "$source/txn.go" | sha256sum)${GO_GCFLAGS:-}

if [ ! -x "$bin/client_go" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    go=$("$root/scripts/install_go.sh")
    mkdir -p "$bin"
    cd "$source"
    GOFLAGS=-buildvcs=false "$go" build -mod=readonly ${GO_GCFLAGS:+-gcflags "$GO_GCFLAGS"} -o "$bin/client_go" . >&2
    echo "$wanted" > "$stamp"
fi
echo "$bin/client_go"
