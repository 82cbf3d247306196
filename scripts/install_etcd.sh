#!/bin/sh
# Fetch etcd, the real one that tests of changefeeds run, into .cache/bin of this checkout. Does nothing where one is on PATH.
# Debian's package is unpacked, not installed: installing would start a service. Elsewhere: set ETCD_BINARY.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
bin="$root/.cache/bin"

if found=$(command -v "${ETCD_BINARY:-etcd}" || command -v "$bin/etcd"); then
    echo "$found"
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
fetch() { apt-get -qq download etcd-server >&2 </dev/null 2>"$scratch/log"; }
if ! fetch; then
    [ "$(id -u)" -ne 0 ] || apt-get -qq update >&2 </dev/null
    fetch || {
        cat "$scratch/log" >&2
        echo "install_etcd.sh: install etcd (Debian, Ubuntu: etcd-server), or let ETCD_BINARY name it" >&2
        exit 1
    }
fi
dpkg-deb -x etcd-server_*.deb unpacked
mkdir -p "$bin"
mv unpacked/usr/bin/etcd "$bin/etcd.$$"
mv "$bin/etcd.$$" "$bin/etcd"
echo "$bin/etcd"
