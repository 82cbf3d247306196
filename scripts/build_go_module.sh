#!/bin/sh
# Build a program of a Go module into .cache/bin of this checkout, and print its path: build_go_module.sh NAME MODULE VERSION SUM PACKAGE [ARGUMENT of go build]...
# SUM is the module's h1: hash; its go.sum has those of the modules that it needs. Does nothing when this version is there.
set -eu

name=$1 module=$2 version=$3 sum=$4 package=$5
shift 5
root=$(cd "$(dirname "$0")/.." && pwd)
bin="$root/.cache/bin"
stamp="$bin/.$name-version"

if [ -x "$bin/$name" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
    echo "$bin/$name"
    exit 0
fi

go=$("$root/scripts/install_go.sh")
export GOTOOLCHAIN=auto GOFLAGS=-buildvcs=false
mkdir -p "$bin"
# Not `go install`, which refuses a module that replaces others: it is built in its folder of the module cache.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
"$go" mod download -json "$module@$version" > module.json
if ! grep -qF "\"Sum\": \"$sum\"" module.json; then
    echo "build_go_module.sh: $module@$version is not what it was: expected $sum" >&2
    exit 1
fi
cd "$(sed -n 's/.*"Dir": "\(.*\)".*/\1/p' module.json)"
timeout 1200 "$go" build -mod=readonly ${GO_GCFLAGS:+-gcflags "$GO_GCFLAGS"} "$@" -o "$bin/$name" "$package" >&2
echo "$version" > "$stamp"
echo "$bin/$name"
