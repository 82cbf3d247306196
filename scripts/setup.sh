#!/usr/bin/env bash
# Prepare a checkout on Debian or Ubuntu: Python environment in .venv, and Java for Spark.
#
#   scripts/setup.sh [EXTRA]        EXTRA: demo (default), test or dev, as in pyproject.toml
#
# With REQUIRE_HASHES=1, as in CI on GitHub, `dev` installs the files of requirements/ only, whose hashes pip compares. Otherwise the versions of
# constraints.txt, from whatever index pip is configured for.
#
# A second run with nothing changed takes a second. Packages are installed with apt-get where this user may do so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=${1:-demo}
venv=.venv
min_java=17

say() { printf '==> %s\n' "$*" >&2; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# apt_install PACKAGE...: as root or by sudo without a password; otherwise says what is missing.
apt_install() {
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || fail "please install: $* (for example: sudo apt-get install $*)"
        as_root=(sudo -n)
    fi
    command -v apt-get >/dev/null || fail "please install: $* (no apt-get here)"
    say "installing $*"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq update >&2 </dev/null
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" >&2 </dev/null
}

# find_python: a Python of at least 3.11; 3.11 itself first, for tikv-client has a wheel for no other.
find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# java_major JAVA: the major version of that program, or 0.
java_major() {
    local version
    version=$("$1" -version 2>&1 </dev/null | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1) || true
    printf '%s' "${version:-0}"
}

has_java() {
    local java=${JAVA_HOME:+$JAVA_HOME/bin/}java
    command -v "$java" >/dev/null && [ "$(java_major "$java")" -ge "$min_java" ]
}

ensure_java() {
    has_java && return
    [ -z "${JAVA_HOME:-}" ] || fail "JAVA_HOME=$JAVA_HOME holds no Java $min_java or newer; point it to one or unset it"
    apt_install openjdk-17-jre-headless || apt_install default-jre-headless
    has_java || fail "Spark needs Java $min_java or newer: install it or set JAVA_HOME"
}

ensure_venv() {
    local python
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python) || {
        apt_install python3 python3-venv
        python=$(find_python) || fail "Python 3.11 or newer is needed"
    }
    say "creating $venv with $python"
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        apt_install "$(basename "$(readlink -f "$python")")-venv" || apt_install python3-venv
        "$python" -m venv --clear "$venv"
    fi
}

# pip_install ARGUMENT...: never into the Python of the machine, as if .venv/bin were a link to elsewhere.
pip_install() {
    PIP_REQUIRE_VIRTUALENV=1 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 </dev/null
}

ensure_packages() {
    local stamp=$venv/.tikv-br-setup-$extra wanted
    wanted=$({
        printf '%s %s\n' "$extra" "$PWD"
        cat pyproject.toml constraints.txt requirements/build.txt requirements/dev.txt
        "$venv/bin/python" -V
    } | sha256sum)
    if [ -x "$venv/bin/tikv-br" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    say "installing tikv-br[$extra] and what it needs into $venv"
    if [ "$extra" = dev ] && [ "${REQUIRE_HASHES:-}" = 1 ]; then
        pip_install --require-hashes -r requirements/build.txt
        pip_install --no-build-isolation --require-hashes -r requirements/dev.txt
        pip_install --no-build-isolation --no-deps -e .
    else
        pip_install -c constraints.txt -e ".[$extra]" # without checksum: see above
    fi
    say "compiling kernels"
    "$venv/bin/python" -m tikv_br.formats.precompile >&2 </dev/null
    printf '%s' "$wanted" >"$stamp"
}

ensure_venv
ensure_packages
ensure_java
