"""How each command is called when all is well. A command that is missing here fails a test.

A name that ends with a flag is a form of the command that does other work; what it is called with begins with the flag's value.
"""

from __future__ import annotations

from tikv_br.cli.command import CommandPath

CALLS: dict[CommandPath, str] = {
    ("backup", "raw"): "-s {new} --pd {pd} --executor driver --safe-interval 0s",
    ("restore", "raw"): "-s {sound} --pd {target} --executor driver --allow-overwrite",
    ("backup", "raw", "--base"): "{sound} -s {increment} --pd {pd} --executor driver --safe-interval 0s",
    ("backup", "merge"): "--base {sound} --log {log} -s {merged} --executor driver",
    (
        "restore",
        "raw",
        "--log",
    ): "{log} --restore-ts latest -s {sound} --pd {target} --executor driver --allow-overwrite",
    ("restore", "point"): "-s {log} --full-backup-storage {sound} --pd {target} --executor driver --allow-overwrite",
    (
        "load",
        "raw",
    ): "--pd {target} --input {table} --key-column key --value-column value --staging {staging} --spark-master local[1]",
    ("log", "start"): "-s {new} --id log --start-ts now --pd {pd} --scratch-dir {scratch}",
    ("log", "status"): "-s {log}",
    ("log", "metadata"): "-s {log}",
    ("log", "pause"): "-s {log}",
    ("log", "resume"): "-s {log}",
    ("log", "compact"): "-s {log} --until {middle} --executor driver --grace 0s",
    ("log", "truncate"): "-s {log} --until {middle} --yes",
    ("log", "stop"): "-s {log} --pd {pd}",
    ("verify",): "{sound} --executor driver --level data",
    ("diff",): "--pd {pd} --storage {sound} --executor driver",
    ("export", "raw"): "-s {exported} --pd {pd} --executor driver --format jsonl",
    ("export", "raw", "--from-backup"): "{sound} -s {exported} --executor driver --overwrite --format csv",
    ("sync",): "--pd {pd} --sink blackhole:// --start-ts now --state-dir {state} --scratch-dir {scratch} --id sync",
    ("changefeed", "create"): "--id other --sink blackhole:// --start-ts now --etcd {etcd} --pd {pd}",
    ("changefeed", "list"): "--etcd {etcd} --pd {pd}",
    ("changefeed", "query"): "feed --etcd {etcd} --pd {pd}",
    ("changefeed", "pause"): "feed --etcd {etcd} --pd {pd}",
    ("changefeed", "update"): "feed --etcd {etcd} --pd {pd} --sink-concurrency 9",
    ("changefeed", "resume"): "feed --etcd {etcd} --pd {pd}",
    ("changefeed", "remove"): "feed --etcd {etcd} --pd {pd}",
    ("capture", "start"): "--etcd {etcd} --pd {pd} --scratch-dir {scratch}",
    ("capture", "list"): "--etcd {etcd} --pd {pd}",
    ("processor", "list"): "--etcd {etcd} --pd {pd}",
    ("check",): "--pd {pd} --storage {new} --executor driver",
    (
        "kafka",
        "replay",
    ): "--from kafka://{kafka}/changes --sink tikv://127.0.0.1:1 --kafka-patience 1s --scratch-dir {scratch}",
    ("gc", "run"): "--etcd {etcd} --pd {pd}",
    ("gc", "status"): "--pd {pd}",
    ("gc", "release"): "{service} --pd {pd} --yes --watch 0s",
    ("list",): "-s {folder}",
    ("show",): "-s {sound}",
    ("show", "--log"): "{log} -s {sound}",
    ("cat",): "-s {sound} row007",
    ("pin",): "-s {folder} {id}",
    ("unpin",): "-s {folder} {id}",
    ("prune",): "-s {folder} --keep-last 1 --confirm",
    ("abort",): "-s {begun}",
    ("unlock",): "-s {begun}",
    # It shows what is wrong with its sources instead of ending: any other call would never end.
    ("serve",): "--status 127.0.0.1:1 --listen 127.0.0.1:0",
    ("drill", "run"): "-s {folder} --pd {pd} --reports {home} --executor driver",
    ("drill", "list"): "--reports {home}",
    ("drill", "show"): "--reports {home} {drill}",
    ("drill", "schedule"): "--print crontab --for {config}",
    ("raw", "put"): "new value --pd {pd}",
    ("raw", "get"): "row007 --pd {pd} --value-format raw",
    ("raw", "delete"): "new --pd {pd}",
    ("raw", "delete-range"): "--start new --end new9 --confirm --pd {pd}",
    ("raw", "ttl"): "row007 --pd {pd}",
    ("raw", "checksum"): "--pd {pd}",
    ("raw", "scan"): "--limit 100 --pd {pd}",
    ("raw", "load"): "--count 50 --pd {pd}",
    ("playground", "start"): "--dir {dir} --detach",
    ("playground", "stop"): "--dir {dir}",
    ("playground", "status"): "--dir {dir}",
    ("playground", "list"): "",
    ("config", "show"): "",
    ("config", "init"): "-",
    ("config", "check"): "",
    ("help",): "",
    ("spark", "pack"): "{packed}",
    ("version",): "",
}
ENDLESS = {("sync",), ("capture", "start"), ("log", "start"), ("gc", "run"), ("kafka", "replay"), ("serve",)}
"""They run until they are told to end: exit code 0 is never theirs."""


NEEDS_STORES = (
    ("backup", "raw"),
    ("backup", "raw", "--base"),
    ("restore", "raw"),
    ("restore", "raw", "--log"),
    ("restore", "point"),
    ("load", "raw"),
    ("diff",),
    ("export", "raw"),
    ("raw", "put"),
    ("raw", "get"),
    ("raw", "delete"),
    ("raw", "checksum"),
    ("raw", "scan"),
    ("raw", "load"),
)
