#!/bin/sh
# Install Azurite, the Azure Blob Storage server of the storage tests, into .cache/azurite of this checkout, and print the path of
# its program. Does nothing when it is there. Needs Node and npm. scripts/azurite/package-lock.json has the hash of each package, and no address.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
folder="$root/.cache/azurite"
version=$(sha256sum < "$root/scripts/azurite/package-lock.json")
program="$root/.cache/bin/azurite-blob"

if [ -x "$program" ] && [ "$(cat "$folder/.version" 2>/dev/null)" = "$version" ]; then
    echo "$program"
    exit 0
fi
if ! command -v npm >/dev/null; then
    echo "install_azurite.sh: install Node and npm (Debian, Ubuntu: npm), and run this again" >&2
    exit 1
fi

mkdir -p "$folder" "$root/.cache/bin"
cp "$root/scripts/azurite/package.json" "$root/scripts/azurite/package-lock.json" "$folder"
npm ci --prefix "$folder" --no-audit --no-fund --ignore-scripts >&2 </dev/null
ln -sfn ../azurite/node_modules/.bin/azurite-blob "$program"
echo "$version" > "$folder/.version"
echo "$program"
