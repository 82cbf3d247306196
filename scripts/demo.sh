#!/usr/bin/env bash
# The main job from nothing: a V1 cluster with data, backed up as V2 to S3 by Spark, restored into a V2 cluster, proven equal.
# Then, while that one is written to: a backup of it, restored into a third cluster, which `sync` keeps seconds behind.
#
#   scripts/demo.sh           needs no arguments and no terminal; everything it starts, it ends
#
# KEYS and VALUE_SIZE may be set; the playgrounds stay in .cache/demo for going on by hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

keys=${KEYS:-100000}
value_size=${VALUE_SIZE:-100}
home=$PWD/.cache/demo
bucket=backups
s3_pid=
writer_pid=
sync_pid=
begin=$SECONDS

say() { printf '\n==> %s\n' "$*"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}
# last_line COMMAND: the last JSON line of a command; when that fails, its last words and its exit code.
last_line() {
    local lines status=0
    lines=$("$@" --output json) || status=$?
    [ "$status" -eq 0 ] || {
        printf '%s\n' "$lines" | tail -n 1 >&2
        exit "$status"
    }
    printf '%s\n' "$lines" | tail -n 1
}
# field NAME: that field of the last JSON line on stdin.
field() { .venv/bin/python -c 'import json, sys; print(json.loads(sys.stdin.read().splitlines()[-1])[sys.argv[1]])' "$1"; }

# end PID: have a process of ours end, if it still runs, and wait for it.
end() {
    [ -z "$1" ] || { kill "$1" 2>/dev/null || true; wait "$1" 2>/dev/null || true; }
}
stop_all() {
    local version
    end "$writer_pid"
    end "$sync_pid"
    for version in v1 v2 recovery; do
        [ ! -d "$home/$version" ] || tikv-br playground stop --dir "$home/$version" >/dev/null 2>&1 || true
    done
    end "$s3_pid"
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

scripts/setup.sh demo
PATH=$PWD/.venv/bin:$PATH
hash -r

say "An empty place: two playgrounds of three stores, and an S3 service (moto)"
stop_all
rm -rf "$home"
mkdir -p "$home"
v1=$(tikv-br playground start --dir "$home/v1" --api-version v1 --stores 3 --regions 6 --detach --output json | field pd)
v2=$(tikv-br playground start --dir "$home/v2" --api-version v2 --stores 3 --detach --output json | field pd)
.venv/bin/python scripts/demo_s3.py "$bucket" >"$home/s3.endpoint" 2>"$home/s3.log" &
s3_pid=$!
for _ in $(seq 200); do
    [ ! -s "$home/s3.endpoint" ] || break
    kill -0 "$s3_pid" 2>/dev/null || { cat "$home/s3.log" >&2; exit 1; }
    sleep 0.1
done
s3=$(cat "$home/s3.endpoint")
printf 'V1 cluster: PD at %s\nV2 cluster: PD at %s\nS3:         %s\n' "$v1" "$v2" "$s3"

export AWS_ACCESS_KEY_ID=demo AWS_SECRET_ACCESS_KEY=demo AWS_EC2_METADATA_DISABLED=true
url="s3://$bucket/first?endpoint=$s3&region=us-east-1&force-path-style=true"

say "Data: $keys pairs into the V1 cluster"
run tikv-br raw import --pd "$v1" --count "$keys" --value-size "$value_size" --seed 7
run tikv-br raw put --pd "$v1" greeting "hello from API V1"

say "Backup: V1 data written as V2, by Spark tasks, to S3"
printf '$ tikv-br backup raw --pd %s --storage "%s" --dst-api-version v2 --executor spark --checksum\n' "$v1" "$url"
backup=$(last_line tikv-br backup raw --pd "$v1" --storage "$url" --dst-api-version v2 --executor spark --checksum)

say "Restore: into the V2 cluster"
printf '$ tikv-br restore raw --pd %s --storage "%s"\n' "$v2" "$url"
restore=$(last_line tikv-br restore raw --pd "$v2" --storage "$url")

say "Proof: the servers' checksums, and every pair of both clusters"
v1_sum=$(last_line tikv-br raw checksum --pd "$v1")
v2_sum=$(last_line tikv-br raw checksum --pd "$v2")
v1_hash=$(tikv-br raw scan --pd "$v1" --output json | sha256sum | cut -c1-16)
v2_hash=$(tikv-br raw scan --pd "$v2" --output json | sha256sum | cut -c1-16)
run tikv-br raw get --pd "$v2" greeting

status=0
.venv/bin/python scripts/demo_summary.py "$v1_sum" "$v2_sum" "$backup" "$restore" "$v1_hash" "$v2_hash" || status=$?

say "Tail: the V2 cluster is written to without pause, backed up, restored into a third cluster, and followed from the backup on"
recovery=$(tikv-br playground start --dir "$home/recovery" --api-version v2 --stores 3 --detach --output json | field pd)
tail_url="s3://$bucket/second?endpoint=$s3&region=us-east-1&force-path-style=true"
write_without_pause() {
    local round=0
    until [ -e "$home/enough" ]; do
        round=$((round + 1))
        tikv-br raw import --pd "$v2" --count 2000 --seed "$round" --output json >/dev/null
        tikv-br raw put --pd "$v2" "round-$round" "written while the cluster was followed"
        [ "$round" -eq 1 ] || tikv-br raw delete --pd "$v2" "round-$((round - 1))"
    done
}
write_without_pause 2>"$home/writer.log" &
writer_pid=$!
printf '$ tikv-br backup raw --pd %s --storage "%s" --safe-interval 3s\n' "$v2" "$tail_url"
last_line tikv-br backup raw --pd "$v2" --storage "$tail_url" --safe-interval 3s >/dev/null
printf '$ tikv-br restore raw --pd %s --storage "%s"\n' "$recovery" "$tail_url"
last_line tikv-br restore raw --pd "$recovery" --storage "$tail_url" >/dev/null
printf '$ tikv-br sync --pd %s --from-backup "%s" --sink tikv://%s --state-dir %s/state\n' "$v2" "$tail_url" "$recovery" "$home"
tikv-br sync --pd "$v2" --from-backup "$tail_url" --sink "tikv://$recovery" --state-dir "$home/state" \
    --status-every 1s --output json >"$home/sync.jsonl" 2>"$home/sync.log" &
sync_pid=$!
# lag: how far the sync is behind, in whole seconds rounded up; nothing before it has begun.
lag() {
    kill -0 "$sync_pid" 2>/dev/null || { cat "$home/sync.log" >&2; exit 1; }
    tail -n 1 "$home/sync.jsonl" | .venv/bin/python -c '
import json, sys
for line in sys.stdin:
    print(*(int(lag) + 1 for name, lag in json.loads(line).items() if name == "checkpoint_lag"))'
}
for _ in $(seq 120); do
    behind=$(lag)
    [ -z "$behind" ] || [ "$behind" -gt 10 ] || break
    sleep 1
done
printf 'The third cluster is %s s behind while writes go on.\n' "${behind:-?}"
touch "$home/enough"
wait "$writer_pid"
writer_pid=
stopped=$SECONDS
until behind=$(lag) && [ -n "$behind" ] && [ "$behind" -lt $((SECONDS - stopped - 1)) ]; do
    [ $((SECONDS - stopped)) -lt 120 ] || { cat "$home/sync.log" >&2; exit 1; }
    sleep 1
done
say "Proof: writes have stopped, and nothing differs"
run tikv-br diff --pd "$v2" --other-pd "$recovery" --exact || status=$?
kill "$sync_pid"
wait "$sync_pid" || [ $? -eq 143 ]
sync_pid=
printf 'sync was told to end; its checkpoint is in %s/state\n' "$home"

cat <<END

Done in $((SECONDS - begin)) s. To go on by hand:
  export PATH=$PWD/.venv/bin:\$PATH
  tikv-br playground start --dir $home/v2 --api-version v2 --detach     # the restored data is still there
  tikv-br playground list
  tikv-br raw scan --pd ADDRESS --limit 5
  tikv-br backup raw --pd ADDRESS --storage local:///tmp/my-first-backup --dry-run
  tikv-br playground start --dir $home/recovery --api-version v2 --detach
  tikv-br sync --pd ADDRESS --sink - --start-ts now --state-dir /tmp/my-sync     # every change as a JSON line
  tikv-br playground stop --dir $home/v2
  tikv-br --help
END
exit "$status"
