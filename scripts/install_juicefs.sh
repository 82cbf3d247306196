#!/bin/sh
# Build JuiceFS, whose metadata tests keep in the playground, into .cache/bin of this checkout: with TiKV and local folders only, which
# takes about two minutes of two cores. Does nothing when it is there. scripts/install_go.sh finds or installs the Go it needs; it needs gcc, too.
set -eu

version=v1.4.1
sum=h1:sz7DmNvKRjJRnlTeRd2EAqgrSSEz5u5G39WPJZA4xKw=
without=nogateway,nowebdav,nocos,nobos,nohdfs,noibmcos,noobs,nooss,noqingstor,nosftp,noswift,noazure,nogs,noufile,nob2,nonfs,nodragonfly,nocifs,nostorj,noqiniu,notos,noks3
without=$without,noredis,nosqlite,nomysql,nopg,nobadger,noetcd
root=$(cd "$(dirname "$0")/.." && pwd)
bin="$root/.cache/bin"
stamp="$bin/.juicefs-version"

if [ -x "$bin/juicefs" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
    echo "$bin/juicefs"
    exit 0
fi

go=$("$root/scripts/install_go.sh")
export GOTOOLCHAIN=auto GOFLAGS=-buildvcs=false
mkdir -p "$bin"
# Not `go install`, which refuses a module that replaces others: it is built in its folder of the module cache.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
"$go" mod download -json "github.com/juicedata/juicefs@$version" > module.json
grep -q "\"Sum\": \"$sum\"" module.json
cd "$(sed -n 's/.*"Dir": "\(.*\)".*/\1/p' module.json)"
timeout 1200 "$go" build -mod=readonly -tags "$without" -ldflags '-s -w' -o "$bin/juicefs" . >&2
echo "$version" > "$stamp"
echo "$bin/juicefs"
