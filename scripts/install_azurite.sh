#!/bin/sh
# Install Azurite, the Azure Blob Storage server of the storage tests, into .cache/azurite of this checkout, and print the path of
# its program. Does nothing when it is there. Needs Node and npm.
set -eu

version=3.35.0
root=$(cd "$(dirname "$0")/.." && pwd)
folder="$root/.cache/azurite"
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
npm install --prefix "$folder" --no-audit --no-fund --no-save --ignore-scripts "azurite@$version" >&2 </dev/null
ln -sfn ../azurite/node_modules/.bin/azurite-blob "$program"
echo "$version" > "$folder/.version"
echo "$program"
