"""Values of sources, made without them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from msgspec import structs

from tikv_br.archive.log import LogArchive
from tikv_br.archive.maintenance import LogStatus
from tikv_br.archive.records import InexactPeriod, LogDescription, LogState, Segment
from tikv_br.backupset.index import IndexEntry, ListedBackup
from tikv_br.cluster.timestamps import compose
from tikv_br.drill.history import PastDrill
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.gc.status import GcReport, ServiceReport, owner_of
from tikv_br.serve.findings import OverviewLimits
from tikv_br.serve.model import Overview, ReadState, States
from tikv_br.serve.sources import Backups, Baseline, Log, Sync
from tikv_br.serve.watcher import find_windows, make_overview
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

NOW_MS = 1_790_000_000_000
HOUR_MS = 3_600_000
CLUSTER = 7_301_482_611_994_712_345
SPAN = KeyRange(b"r\0\0\0", b"r\0\0\1")
ROOT = parse("s3://backups/full?endpoint=https://s3.example.com&region=eu-1")


def entry(path: str, hours: float, parent: str = "", **changes: object) -> IndexEntry:
    """A backup that ended so many hours ago; `parent`: a path at the same root."""
    finished = NOW_MS - round(hours * HOUR_MS)
    made = IndexEntry(
        id=hashlib.sha256(path.encode()).hexdigest()[:16],
        path=path,
        engine="store",
        file_format="sst",
        api_version=ApiVersion.V2,
        dst_api_version=ApiVersion.V2,
        cluster_id=CLUSTER,
        scope="0" * 16,
        keyspaces=(0,),
        backup_ts=compose(finished - 240_000),
        parent=ROOT.child(parent).redacted() if parent else "",
        total_kvs=48_211_337,
        total_bytes=61_904_221_184,
        backup_size=17_203_118_080,
        files=412,
        started_ms=finished - 300_000,
        finished_ms=finished,
        tool_version="1.0.0",
        encryption="plaintext",
    )
    return structs.replace(made, **changes)


def backups(*entries: IndexEntry, pinned: str = "") -> ReadState[Backups]:
    """A storage that was read a moment ago."""
    listed = sorted(
        (ListedBackup(each, each.path == pinned) for each in entries), key=lambda each: -each.entry.finished_ms
    )
    baselines: dict[str, Baseline | str] = {
        each.id: Baseline(CLUSTER, (SPAN,), each.backup_ts, compose(each.finished_ms))
        for each in entries
        if each.backup_ts
    }
    return ReadState(ROOT.redacted(), Backups(ROOT, tuple(listed), baselines), NOW_MS - 12_000)


def log(
    name: str = "default",
    hours: float = 72.0,
    lag: float = 31.4,
    inexact: tuple[InexactPeriod, ...] = (),
    **changes: object,
) -> ReadState[Log]:
    """A log archive with one segment, from so many hours ago to `lag` seconds ago; `changes` are of its status."""
    start, end = compose(NOW_MS - round(hours * HOUR_MS)), compose(NOW_MS - round(lag * 1000))
    description = LogDescription(name, "1.0.0", CLUSTER, ApiVersion.V2, 0, (SPAN,), start, 0, has_checkpoint=True)
    segment = Segment(name, SPAN.start, SPAN.end, start, end, (), NOW_MS, "0" * 8, inexact)
    archive = LogArchive(open_store(parse("/nowhere")), description, (segment,), checkpoint_ts=end)
    status = log_status(name, lag, **changes)
    return ReadState(f"{status.storage} (log {name})", Log(archive, status), NOW_MS - 9_000)


def log_status(name: str = "default", lag: float = 31.4, **changes: object) -> LogStatus:
    """A log archive that does well, unless changed."""
    start, end = NOW_MS - 72 * HOUR_MS, NOW_MS - round(lag * 1000)
    made = LogStatus(
        log_id=name,
        storage="s3://backups/log?endpoint=https%3A%2F%2Fs3.example.com&region=eu-1",
        cluster_id=CLUSTER,
        keyspace_id=0,
        keyspace_name="",
        keyspaces=(0,),
        keyspace_names=("",),
        ranges=("-",),
        state=LogState.ACTIVE,
        start_ts=compose(start),
        checkpoint_ts=compose(end),
        end_ts=compose(end),
        restorable_ts=compose(end),
        rpo_seconds=lag,
        segments=812,
        files=2411,
        rows=91_204_551,
        size=8_204_551_168,
        size_per_day=2_734_850_048,
        scan_window_count=0,
        scan_window_seconds=0.0,
        gaps=(),
        damage=(),
        encryption="plaintext",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def drill(days: int, verdict: str = "passed", rto: float | None = 400.0, **changes: object) -> PastDrill:
    """A drill so many days ago."""
    at = NOW_MS - days * 24 * HOUR_MS - HOUR_MS
    made = PastDrill(
        id=f"20260921T{days:06d}-abcdef",
        verdict=verdict,
        scenario="lost-cluster",
        started_ms=at,
        seconds=612.0,
        rpo=None if rto is None else 60.0 + days,
        rto=rto,
        keys=48_211_337,
        restored_keys=48_211_002,
        data_bytes=61_904_221_184,
        speed=None,
        made_backup="",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def service(name: str, hours: float, ttl: float | None = 86_000.0) -> ServiceReport:
    """A safe point so many hours old."""
    return ServiceReport(name, owner_of(name), compose(NOW_MS - round(hours * HOUR_MS)), hours * 3600, ttl)


def gc_report(*services: ServiceReport, hours: float = 30.0) -> GcReport:
    """A GC whose worker asks for ten minutes."""
    held = NOW_MS - round(hours * HOUR_MS)
    return GcReport(NOW_MS, compose(held), compose(NOW_MS - 600_000), services)


def healthy() -> States:
    """All sources, and all is well."""
    chain = (
        entry("2026-09-20", 26.0),
        entry("2026-09-21-00", 14.0, "2026-09-20", total_kvs=812_004, total_bytes=902_118_400, backup_size=301_118_080),
        entry(
            "2026-09-21-12", 2.2, "2026-09-21-00", total_kvs=611_940, total_bytes=801_118_400, backup_size=281_118_080
        ),
    )
    return States(
        backups=(
            backups(
                *chain,
                entry("2026-09-13", 194.0, encryption="aes256-ctr"),
                entry("2026-08-30-v1", 530.0, dst_api_version=ApiVersion.V1, backup_ts=0, engine="go", keyspaces=()),
                pinned="2026-09-13",
            ),
        ),
        logs=(log(),),
        syncs=(
            ReadState(
                "http://10.0.0.5:8300",
                (
                    Sync(
                        "east", "", "", 1.8, 0.7, 2204.0, 91_204_551, "10.0.0.1:2379", "tikv://10.2.0.1:2379?keyspace=7"
                    ),
                    Sync("west", "", "", 2.4, None, 0.0, 12_204, "10.0.0.1:2379", "kafka://10.3.0.1:9092/users"),
                ),
                NOW_MS - 4_000,
            ),
        ),
        drills=(
            ReadState(
                "s3://backups/drills",
                tuple(drill(days, rto=380.0 + 11 * (days % 5)) for days in range(12, -1, -1)),
                NOW_MS - 5_000,
            ),
        ),
        gc=(
            ReadState(
                "10.0.0.1:2379",
                gc_report(
                    service("tikv-br-sync-east", 2.1), service("tikv-br-backup-20260921-9f3a1c", 0.4, 252.0), hours=2.1
                ),
                NOW_MS - 7_000,
            ),
        ),
    )


def overview(states: States | None = None, limits: OverviewLimits | None = None) -> Overview:
    """The overview of states, by default of `healthy`."""
    states = healthy() if states is None else states
    return make_overview(states, find_windows(states), limits or OverviewLimits(), NOW_MS)


def troubled() -> States:
    """Each source has something wrong, and text that no page must take for markup."""
    good, evil = healthy(), "<script>alert(1)</script>\"'&\u202e"
    broken: ReadState[Backups] = ReadState(
        "s3://other/full", None, 0, "s3://other/full denied access: <b>403</b>", "Check the credentials."
    )
    stale = replace(
        good.drills[0], error="the storage does not answer", hint="Check the network.", read_ms=NOW_MS - 900_000
    )
    drills = good.drills[0].value or ()
    return States(
        backups=(
            backups(entry("2026-09-21", 30.5), entry(f"{evil}/a", 31.0, engine=evil, parent=evil)),
            broken,
        ),
        logs=(
            log("late", lag=4000.0),
            log("gaps", gaps=("keys a to b from x to y",), damage=("segments/1.json is missing",)),
            ReadState("s3://gone/log (log default)", None, 0, "there is no log default", "Check the URL."),
        ),
        syncs=(
            ReadState(
                "http://10.0.0.5:8300",
                (
                    Sync(evil, "2400 s behind, which is more than 300 s", "", 2400.0, 0.7, 2204.0, 91_204_551),
                    Sync("west", "", "the source's PD has not answered for 12 s", 2.4, None, 0.0, 12_204),
                    Sync("new", "has not started yet", "", None, None, 0.0, 0),
                ),
                NOW_MS - 4_000,
            ),
            ReadState("http://10.0.0.6:8300", None, 0, "http://10.0.0.6:8300 does not answer: Connection refused"),
        ),
        drills=(replace(stale, value=(*drills, drill(0, "failed", None, scenario=evil, id=evil))),),
        gc=(
            ReadState(
                "10.0.0.1:2379",
                gc_report(service("tikv-br-sync-forgotten", 210.0, 4.0), service(evil, 4.0, None), hours=210.0),
                NOW_MS - 7_000,
            ),
            ReadState("10.0.0.9:2379", None),
        ),
    )
