#!/bin/sh
# Print the path of a Go that builds the programs of the tests. Needs 1.21: from then on a Go fetches the version a module asks for.
# GO may name one. Where there is only an older one (Debian 12 has 1.19), that fetches a newer through the Go module proxy.
set -eu

toolchain=golang.org/toolchain@v0.0.1-go1.25.0.linux-amd64
sum=h1:wVC9wx2XOcP5gHiN8ZzfyTfjlrDLSS7Hu1wjI01n68U=
root=$(cd "$(dirname "$0")/.." && pwd)

minor() { "$1" version 2>/dev/null </dev/null | sed -n 's/.*go1\.\([0-9]*\).*/\1/p'; }

old=
for go in "${GO:-}" "$(command -v go || true)" /usr/local/go/bin/go "$root/.cache/go/bin/go"; do
    [ -n "$go" ] && [ -x "$go" ] || continue
    version=$(minor "$go")
    if [ "${version:-0}" -ge 21 ]; then
        echo "$go"
        exit 0
    fi
    old=$go
done

if [ -z "$old" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends golang-go ca-certificates >&2
    exec "$0"
fi
if [ -z "$old" ] || [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "install_go.sh: install Go 1.21 or newer, or let GO name it, and run this again" >&2
    exit 1
fi

# The module cache keeps no permission to execute, so the toolchain is copied out of it.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
"$old" mod init toolchain >&2 2>/dev/null
GOFLAGS=-modcacherw GOPATH="$scratch/path" "$old" mod download -json "$toolchain" > module.json
grep -qF "\"Sum\": \"$sum\"" module.json
mkdir -p "$root/.cache"
rm -rf "$root/.cache/go"
mv "$scratch/path/pkg/mod/$toolchain" "$root/.cache/go"
chmod -R +x "$root/.cache/go/bin" "$root/.cache/go/pkg/tool"
echo "$root/.cache/go/bin/go"
