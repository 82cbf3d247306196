#!/usr/bin/env bash
# Set everything up and pass the tests: static checks, then all tiers.
#
#   scripts/test.sh                   everything
#   scripts/test.sh unit golden       some tiers only
#   scripts/test.sh tests/unit/formats -k mce     or any arguments of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '==> %s\n' "$*" >&2; }

# Programs that some tests compare with or run against; a machine where they cannot be had skips those tests (CI fails them).
install_packages() {
    local missing=()
    command -v sst_dump >/dev/null || command -v rocksdb_sst_dump >/dev/null || missing+=(rocksdb-tools)
    command -v openssl >/dev/null || missing+=(openssl)
    command -v go >/dev/null || [ -x /usr/local/go/bin/go ] || missing+=(golang-go ca-certificates)
    [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
    # For the status page: 100 MB to fetch, half a minute. By itself, as Ubuntu has no such package.
    has_chromium || apt_install chromium-headless-shell
}

# apt_install PACKAGE...: where this user may.
apt_install() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 0
    say "installing $*"
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"; } \
        >&2 </dev/null || say "could not install $*: tests that need them will say so"
}

has_chromium() {
    local name
    for name in "${TIKV_BR_CHROMIUM:-chromium-headless-shell}" chromium-headless-shell chromium chromium-browser google-chrome; do
        command -v "$name" >/dev/null && return
    done
    return 1
}

# One after the other, as each uses all cores. The Rust client takes minutes: only where it is asked for.
build_programs() {
    local script
    for script in install_etcd install_client_go install_versitygw ${TIKV_BR_TEST_RUST_CLIENT:+install_rust_client}; do
        "scripts/$script.sh" >/dev/null </dev/null || say "scripts/$script.sh failed: tests that need it will say so"
    done
}

# All of them run, and the tests after them, so that one look shows everything that is wrong.
static_checks() {
    local status=0
    say "ruff, mypy, import-linter, generated docs, dependency audit"
    .venv/bin/ruff check --quiet . || status=1
    .venv/bin/ruff format --quiet --check . || status=1
    .venv/bin/mypy || status=1
    .venv/bin/mypy --no-error-summary tests || status=1
    .venv/bin/lint-imports --no-logo | tail -n 3 || status=1
    .venv/bin/python scripts/generate_exit_codes.py --check || status=1
    .venv/bin/python scripts/generate_cli_json.py --check || status=1
    .venv/bin/python scripts/audit_dependencies.py || status=1
    return "$status"
}

# One worker more than cores, from three to five: many tests wait, for leases, clocks and servers that are to give up.
workers() {
    local cores
    cores=$(nproc)
    printf '%s' $((cores < 2 ? 3 : cores > 4 ? 5 : cores + 1))
}

# Tests start servers and wait for clocks; on a busy machine one of 5,000 may miss its time. What is simply broken fails again, so up to
# three are run once more, alone and with the same seed, and are named loudly either way. More than three are no coincidence.
once_more() {
    local failed=.pytest_cache/v/cache/lastfailed
    local count
    count=$(.venv/bin/python -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' "$failed") || return 1
    [ "$count" -ge 1 ] && [ "$count" -le 3 ] || return 1
    say "failed beside others, now once more and alone: $count"
    printf "%s\n" "$(<"$failed")" >&2
    .venv/bin/python -m pytest -p randomly --randomly-seed=last --last-failed "$@" </dev/null || return 1
    say "UNSTEADY: $count failed beside others and passed alone; each is a fault to look for, in the test or in what it tests"
}

install_packages
build_log=$(mktemp)
trap 'rm -f "$build_log"' EXIT
build_programs 2>"$build_log" & # beside setup and static checks, which mostly wait for the network and use one core
building=$!
scripts/setup.sh dev

arguments=()
for argument in "$@"; do
    case $argument in
    unit | golden | integration | interop | e2e) arguments+=("tests/$argument") ;;
    *) arguments+=("$argument") ;;
    esac
done
status=0
[ $# -gt 0 ] || static_checks || status=1

wait "$building" || true
cat "$build_log" >&2

say "pytest ${arguments[*]:-(all tiers)}"
tests=0
.venv/bin/python -m pytest -n "$(workers)" --dist loadfile --durations 25 "${arguments[@]}" </dev/null || tests=$?
[ "$tests" -ne 1 ] || ! once_more "${arguments[@]}" || tests=0
[ "$tests" -eq 0 ] || status=$tests
exit "$status"
