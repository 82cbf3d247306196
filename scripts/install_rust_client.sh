#!/bin/sh
# Build tests/interop/rust_client, the tests' RawKV client in Rust, into .cache/bin of this checkout. Does nothing when it is there.
# Needs a cargo of about 2025 or newer (Debian 12's is too old) and three minutes of processor time.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
source="$root/tests/interop/rust_client"
bin="$root/.cache/bin"
stamp="$bin/.rust_client-sources"
wanted=$(cat "$source/Cargo.toml" "$source/Cargo.lock.part" "$source/src/main.rs" | sha256sum)

if [ ! -x "$bin/rust_client" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if ! command -v cargo >/dev/null; then
        echo "install_rust_client.sh: cargo is missing: install Rust (https://rustup.rs) and run this again" >&2
        exit 1
    fi
    # Built from a copy, as the lock file names cargo's registry: a new one has that name, the committed part the versions and checksums.
    build="$root/.cache/rust_client"
    mkdir -p "$bin" "$build"
    cp -r "$source/Cargo.toml" "$source/src" "$build"
    rm -f "$build/Cargo.lock"
    cargo generate-lockfile --quiet --manifest-path "$build/Cargo.toml" >&2
    registry=$(sed -n '/^source = /{p;q;}' "$build/Cargo.lock")
    sed "s|^checksum = |$registry\n&|" "$source/Cargo.lock.part" > "$build/Cargo.lock.new"
    mv "$build/Cargo.lock.new" "$build/Cargo.lock"
    CARGO_TARGET_DIR="$build/target" cargo build --locked --quiet --manifest-path "$build/Cargo.toml" >&2
    cp "$build/target/debug/rust_client" "$bin/rust_client"
    echo "$wanted" > "$stamp"
fi
echo "$bin/rust_client"
