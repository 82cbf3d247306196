"""Whole commands: what they take beyond the time in which stores were at work, step by step, by wall and by processor time.

The playground's stores are slower than real ones, and share the processors with the command; what is left when their
time is taken off does not depend on that. With the path of another work tree in `BEFORE`, its commands run by turns with these.

With ``TIKV_BR_PD_SERVER`` and ``TIKV_BR_TIKV_SERVER`` the servers are real, which do not say when they are at work: then each command and
step is measured as a whole. If `RIVALS` name the Go tools, these do the same work by turns with ours, on both kinds of servers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.command import TIKV_BR, TOO_LONG, timed
from bench.harness import Figure, Scale, Spread, paired
from tests.e2e.command import succeed
from tests.support import real_servers
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.live_txn_backups import call
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion

BENCH = "commands"
BEFORE = "TIKV_BR_BENCH_BEFORE"
RIVALS = {"raw": "TIKV_BR_GO_TOOL", "txn": "TIKV_BR_BR_TOOL"}
"""Variables with the paths of the Go TiKV-BR and of BR, by the kind of data that they back up."""
VALUE_SIZE, REGIONS, STORES = 100, 12, 3
BATCH = 1000


@dataclass(slots=True)
class Run:
    """Seconds of one command; `busy` are those in which some store had a call under way, 0 of real ones."""

    wall: float = 0.0
    cpu: float = 0.0
    busy: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of each step beyond those in which a store had a call under way."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A program that does the work of a command."""

    program: str = TIKV_BR
    tree: str = ""
    """The work tree, if it is not this one."""
    flags: tuple[str, ...] = ()


def parts(run: Run) -> dict[str, float]:
    """The seconds of a run that a table shows: the whole command, its parts, and its steps."""
    stores = {} if real_servers.CHOSEN else {"stores at work": run.busy, "the command's own": run.wall - run.busy}
    steps = {f"step {name}": seconds for name, seconds in run.steps.items()}
    return {"whole command": run.wall, **stores, "its processor time": run.cpu, **steps}


def figures(scale: Scale) -> Iterator[Figure]:
    """Seconds of each command: all of it, the stores', the rest, processor time, and each step."""
    subjects = {"": Subject()}
    if os.environ.get(BEFORE):
        subjects["before: "] = Subject(tree=os.environ[BEFORE])
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        place = Path(name, "backup")
        source = stack.enter_context(live_cluster(Path(name, "source"), ApiVersion.V1, stores=STORES))
        fill(source, scale.store_rows)
        url = f"local://{place}"
        backup = ("backup", "raw", "-u", source.pd, "-s", url, "--dst-api-version", "v2")
        rival: dict[str, Subject] = {}
        if go_tool := os.environ.get(RIVALS["raw"]):
            rival = {"Go TiKV-BR: ": Subject(go_tool)}
        commands: dict[str, tuple[LiveCluster, tuple[str, ...], Mapping[str, Subject]]] = {
            "raw get": (source, ("raw", "get", "-u", source.pd, f"key-{0:012d}"), subjects),
            "backup, scan": (source, backup, _with_flags(subjects, "--engine", "scan")),
            "backup, store": (source, backup, _with_flags(subjects, "--engine", "store") | rival),
        }
        if br_tool := os.environ.get(RIVALS["txn"]):
            written = stack.enter_context(live_cluster(Path(name, "transactions"), ApiVersion.V1, stores=STORES))
            fill_transactions(written, scale.store_rows)
            txn_backup = ("backup", "txn", "-u", written.pd, "-s", url)
            commands["backup txn"] = (written, txn_backup, subjects | {"BR: ": Subject(br_tool)})
        for command, (cluster, arguments, chosen) in commands.items():
            works = {label: partial(_run, cluster, arguments, place, each) for label, each in chosen.items()}
            yield from _figures(f"{command}, {scale.store_rows:,} rows", works, scale)
            if command == "backup, store":  # all of its rounds are backups of the same rows: the last is restored
                restores = {
                    label: partial(_restore, Path(name, "target"), url, place, each)
                    for label, each in (subjects | _with_flags(rival, "--checksum")).items()
                }
                yield from _figures(f"restore, {scale.store_rows:,} rows", restores, scale)


def _with_flags(subjects: Mapping[str, Subject], *flags: str) -> dict[str, Subject]:
    return {label: Subject(each.program, each.tree, flags) for label, each in subjects.items()}


def _figures(case: str, works: Mapping[str, Callable[[], Run]], scale: Scale) -> Iterator[Figure]:
    for label, runs in paired(works, scale.process_rounds).items():
        shown = [parts(run) for run in runs]
        for part in shown[0]:
            values = [max(each.get(part, 0.0), 1e-6) for each in shown]
            yield Figure(BENCH, case, label + part, "s", Spread.of(values), len(runs))


def _restore(folder: Path, url: str, place: Path, subject: Subject) -> Run:
    """Restore once, into a cluster that has never had a row: stores take long to skip deleted ones."""
    with live_cluster(folder, ApiVersion.V2, stores=STORES) as target:
        target.disturbed = True
        try:
            return _run(target, ("restore", "raw", "-u", target.pd, "-s", url), place, subject)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _run(cluster: LiveCluster, arguments: tuple[str, ...], place: Path, subject: Subject) -> Run:
    """Run it once; a backup into an empty place."""
    if arguments[0] == "backup":
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o777)
    run, began = Run(), dict[str, float]()
    is_played = real_servers.CHOSEN is None
    if is_played:
        cluster.forget_calls()

    def busy() -> float:
        return float(cluster.calls()["busy_seconds"]) if is_played else 0.0

    def on_line(line: bytes) -> None:
        said = json.loads(line) if line.startswith(b"{") else {}
        if said.get("message_type") != "step" or "name" not in said:
            return
        if said["state"] == "started":
            began[said["name"]] = busy()
        elif said["name"] in began and "seconds" in said:
            run.steps[said["name"]] = max(said["seconds"] - (busy() - began[said["name"]]), 0.0)

    ours = ("--output", "json") if subject.program == TIKV_BR else ()
    took = timed(*arguments, *subject.flags, *ours, tree=subject.tree, program=subject.program, on_line=on_line)
    run.wall, run.cpu, run.busy = took.wall, took.cpu, busy()
    return run


def fill(source: LiveCluster, rows: int) -> None:
    """Load as many rows of `VALUE_SIZE`, into regions that all stores lead."""
    codec, keys = source.raw().codec, [b"key-%012d" % (rows * part // REGIONS) for part in range(1, REGIONS)]
    source.split(*(codec.bound(codec.rpc_key(key)) for key in keys))
    source.scatter()
    succeed("raw", "import", "--pd", source.pd, "--count", str(rows), "--value-size", str(VALUE_SIZE), timeout=TOO_LONG)


def fill_transactions(source: LiveCluster, rows: int) -> None:
    """Commit as many rows of `VALUE_SIZE`, `BATCH` to a transaction."""
    value = bytes(range(VALUE_SIZE))
    for first in range(0, rows, BATCH):
        keys = [b"key-%012d" % number for number in range(first, min(first + BATCH, rows))]
        start_ts = source.cluster.pd.tso()
        prewrite = kvrpcpb_pb2.PrewriteRequest(
            mutations=[kvrpcpb_pb2.Mutation(op=kvrpcpb_pb2.Put, key=key, value=value) for key in keys],
            primary_lock=keys[0],
            start_version=start_ts,
            lock_ttl=60_000,
            min_commit_ts=start_ts + 1,
        )
        if call(source, "KvPrewrite", keys[0], prewrite).errors:
            raise SystemExit("cannot write transactions to back up")
        commit_ts = source.cluster.pd.tso()
        commit = kvrpcpb_pb2.CommitRequest(keys=keys, start_version=start_ts, commit_version=commit_ts)
        if call(source, "KvCommit", keys[0], commit).HasField("error"):
            raise SystemExit("cannot commit transactions to back up")
