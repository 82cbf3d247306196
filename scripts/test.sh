#!/usr/bin/env bash
# Set everything up and run the tests.
#
#   scripts/test.sh                   static checks, unit, golden, and the core integration and end-to-end tests: 8 minutes on 2 cores
#   scripts/test.sh all               static checks and every test, property tests with many more examples: 50 minutes
#   scripts/test.sh rest              what `all` runs beyond the first form, for CI
#   scripts/test.sh real [PATH...]    the tests that run on real servers, on those of TIKV_BR_PD_SERVER and TIKV_BR_TIKV_SERVER, with a table by feature
#   scripts/test.sh packages          install what `rest` needs of Debian's packages, and run nothing
#   scripts/test.sh programs          build the programs that only `rest` needs, and run nothing
#   scripts/test.sh unit golden       whole tiers
#   scripts/test.sh tests/unit/formats -k mce     any arguments of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Without the first each worker and each process of a test compiles all modules again: a minute and more. The others are settings of the person
# who runs this, as of another Spark; tests start servers and programs which would obey them.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME PYTHONOPTIMIZE PYTHONWARNINGS PYTHONIOENCODING PYTEST_ADDOPTS COLUMNS LINES TZ LC_ALL LANG \
    JAVA_TOOL_OPTIONS _JAVA_OPTIONS JDK_JAVA_OPTIONS ARROW_DEFAULT_MEMORY_POOL PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION CDPATH GREP_OPTIONS POSIXLY_CORRECT
while IFS= read -r name; do
    unset "$name"
done < <(compgen -e | grep -E '^(SPARK_|PYSPARK_|HADOOP_|YARN_|NUMBA_|GRPC_|OMP_|XDG_|TIKV_BR_.*(SERVICE|PORT))' || true)
umask 022
[ -n "${HOME:-}" ] || export HOME=/tmp
export LC_ALL=C.UTF-8

say() { printf '==> %s\n' "$*" >&2; }

# Programs that some tests compare with or run against; without them those tests are skipped, in CI they fail.
# No core test needs Go (for JuiceFS, versitygw, fake-gcs-server and the Go client), npm (for Azurite), Maven (for Avro and Kafka) or Chromium (for the pages; 100 MB), so the default does without.
install_packages() {
    local missing=()
    command -v sst_dump >/dev/null || command -v rocksdb_sst_dump >/dev/null || missing+=(rocksdb-tools)
    command -v openssl >/dev/null || missing+=(openssl)
    [ "$selection" = core ] || command -v go >/dev/null || [ -x /usr/local/go/bin/go ] || missing+=(golang-go ca-certificates)
    [ "$selection" = core ] || command -v gcc >/dev/null || missing+=(gcc libc6-dev) # for JuiceFS
    [ "$selection" = core ] || command -v npm >/dev/null || missing+=(npm)
    [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
    # By itself, as Ubuntu has no such package.
    [ "$selection" = core ] || command -v mvn >/dev/null || apt_install maven
    [ "$selection" = core ] || has_chromium || apt_install chromium-headless-shell
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

# One after the other, as each uses all cores. The Rust client takes minutes: only if it is asked for. Without Go's optimizations, and with
# less work for its garbage collector, a build takes two thirds of the processor time, and tests do not notice.
build_programs() {
    export GO_GCFLAGS='all=-N -l' GOGC=400
    local script scripts=(install_etcd)
    [ "$selection" != programs ] || scripts=()
    [ "$selection" = core ] || scripts+=(install_client_go install_juicefs install_versitygw install_azurite install_fake_gcs_server install_spark_avro install_kafka install_deploy_tools ${TIKV_BR_TEST_RUST_CLIENT:+install_rust_client})
    for script in "${scripts[@]}"; do
        "scripts/$script.sh" >/dev/null </dev/null || say "scripts/$script.sh failed: tests that need it will say so"
    done
}

# All of them run, beside the tests, so that one look shows everything that is wrong.
static_checks() {
    local status=0
    say "ruff, mypy, import-linter, generated docs, documentation site, dependency audit"
    .venv/bin/ruff check --quiet . || status=1
    .venv/bin/ruff format --quiet --check . || status=1
    .venv/bin/mypy || status=1
    .venv/bin/mypy --no-error-summary tests || status=1
    .venv/bin/lint-imports --no-logo | tail -n 3 || status=1
    .venv/bin/python scripts/generate_exit_codes.py --check || status=1
    .venv/bin/python scripts/generate_cli_json.py --check || status=1
    NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet || status=1
    .venv/bin/python scripts/audit_dependencies.py || status=1
    .venv/bin/python scripts/check_quarantine.py || status=1
    return "$status"
}

# More workers than cores, as many tests wait, for leases, clocks and servers that are to give up: four leave two cores idle for a tenth of the time.
workers() {
    local cores
    cores=$(nproc)
    printf '%s' $((cores < 2 ? 4 : cores > 3 ? 6 : cores + 3))
}

# Up to three failed tests are run again, alone and with the same seed, to tell a race from a defect. A test that passes only then
# still fails the run, unless tests/quarantine.toml lists it. More than three failures are no coincidence and are not retried.
retry_failed() {
    local names=$scratch/failed count
    cp .pytest_cache/v/cache/lastfailed "$names" 2>/dev/null || return 1
    count=$(.venv/bin/python -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' "$names") || return 1
    [ "$count" -ge 1 ] && [ "$count" -le 3 ] || return 1
    say "$count failed; running them again, alone and with the same seed"
    .venv/bin/python -m pytest -p randomly --randomly-seed=last --last-failed "$@" </dev/null || return 1
    .venv/bin/python scripts/check_quarantine.py --unsteady "$names"
}

# The selections of tests: an expression of markers for each.
core='(unit or golden or core) and not slow'
selection=
arguments=()
case ${1:-} in
'')
    selection=core
    # Other modules are not even collected.
    mapfile -t with_core < <(grep -rl --include='test_*.py' 'pytest\.mark\.core' tests/integration tests/e2e)
    arguments=(-m "$core" tests/unit tests/golden "${with_core[@]}")
    ;;
all) selection=all ;;
rest)
    selection=rest
    # Of units, modules without such tests are not collected: each worker would import them.
    mapfile -t with_more < <(grep -rlE --include='test_*.py' 'hypothesis|pytest\.mark\.slow' tests/unit tests/golden)
    arguments=(-m "hypothesis or not ($core)" tests/integration tests/interop tests/e2e "${with_more[@]}")
    ;;
real)
    for name in TIKV_BR_PD_SERVER TIKV_BR_TIKV_SERVER; do
        [ -x "${!name:-}" ] || { say "$name must be the path of a program: pd-server and tikv-server of TiKV's releases"; exit 2; }
    done
    selection=real
    arguments=(-p tests.real.plugin)
    [ $# -gt 1 ] || arguments+=(tests/integration tests/interop tests/e2e)
    ;;
packages | programs) selection=$1 ;;
esac
if [ -n "$selection" ]; then
    shift "$(($# > 0))"
    [[ $selection = core || $selection = real ]] || export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-thorough}
fi
for argument in "$@"; do
    case $argument in
    unit | golden | integration | interop | e2e) arguments+=("tests/$argument") ;;
    *) arguments+=("$argument") ;;
    esac
done

case $selection in
packages)
    install_packages
    exit
    ;;
programs)
    build_programs
    exit
    ;;
esac

install_packages
scratch=$(mktemp -d)
checking=
trap 'rm -rf "$scratch"; [ -z "$checking" ] || kill "$checking" 2>/dev/null || true' EXIT
build_programs 2>"$scratch/build.log" & # beside setup, which mostly waits for the network
building=$!
scripts/setup.sh dev
# Again, as sources may have changed since set-up: each worker would compile the same kernels in its first tests.
.venv/bin/python -m tikv_br.formats.precompile || say "kernels could not be compiled: tests will say why"

wait "$building" || true
cat "$scratch/build.log" >&2
case $selection in
rest | all)
    if shared=$(scripts/share_spark_classes.sh); then
        export JAVA_HOME=$shared
    else
        say "scripts/share_spark_classes.sh failed: Spark starts more slowly"
    fi
    ;;
esac

case $selection in
core | all)
    static_checks >"$scratch/checks.log" 2>&1 </dev/null & # in the time that tests wait
    checking=$!
    renice -n 5 -p "$checking" >/dev/null || true
    ;;
esac

say "pytest ${arguments[*]:-(all tests)}"
status=0
if [ "$selection" = real ]; then # one after the other: real servers use both cores
    .venv/bin/python -m pytest --cache-clear -p no:randomly --durations 25 "${arguments[@]}" </dev/null || status=$?
    exit "$status"
fi
.venv/bin/python -m pytest --cache-clear ${TEST_ORDER:+-p randomly --randomly-seed="$TEST_ORDER"} -n "$(workers)" --dist loadfile --no-loadscope-reorder --durations 25 "${arguments[@]}" </dev/null || status=$?
[ "$status" -ne 1 ] || ! retry_failed "${arguments[@]}" || status=0

if [ -n "$checking" ]; then
    wait "$checking" || status=$((status ? status : 1))
    cat "$scratch/checks.log" >&2
fi
exit "$status"
