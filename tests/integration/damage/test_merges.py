"""Every kind of object that a merge reads, damaged in every way: it is named, and no rows are made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.backup.data import load
from tests.integration.damage.conftest import Variant, options, rows
from tests.integration.restore.points import merged_to, rows_of
from tests.support.damage import Case, Objects, Victim, cases, read_objects
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.unit.incremental.changes import Change, batch
from tikv_br.archive.log import LogSource
from tikv_br.archive.records import LogDescription
from tikv_br.archive.writer import FlushOptions, LogWriter
from tikv_br.backup.merge import MergeOptions, merge_backup
from tikv_br.backup.run import backup
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.errors import BackupSetError, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.incremental.backup import back_up_changes
from tikv_br.point_in_time import PointOptions, restore_to_point
from tikv_br.restore.options import RestoreOptions
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

FLIPS = 12
PARTS = ("full", "increment", "log")
UNREAD = {"lock"}
LOG_ID = "main"
STEP = 10 << 18
"""Length of the log's segments: 10 ms."""
Rows = dict[bytes, bytes]


@dataclass(frozen=True)
class Chain:
    """A full backup, an increment and a log, and the rows of them together and without the log."""

    variant: Variant
    objects: dict[str, Objects]
    older: dict[str, Objects]
    """The same of another full backup of the cluster and what follows it."""
    end_ts: int
    merged: Rows
    without_log: Rows


def write_log(folder: Path, live: LiveCluster, start_ts: int, end_ts: int, name: bytes) -> Rows:
    """Write a log of several segments of one size; returns the rows that it adds."""
    span = KeyCodec(ApiVersion.V2, 0).rpc_range()
    description = LogDescription(
        LOG_ID, "0.1.0", live.cluster.cluster_id, ApiVersion.V2, 0, (span,), start_ts, 1, has_checkpoint=False
    )
    writer = LogWriter(open_store(StorageLocation("local", str(folder))), description, span, FlushOptions(interval=1e9))
    writer.start(start_ts)
    writer.flush(end_ts - 4 * STEP)
    added: Rows = {}
    for ts in range(end_ts - 4 * STEP, end_ts, STEP):
        new = {b"row%03d" % at: b"%s at %20d" % (name, ts) for at in range(ts // STEP % 7, 240, 7)}
        writer.append(batch([Change(ts + 1 + at, key, value) for at, (key, value) in enumerate(sorted(new.items()))]))
        writer.flush(ts + STEP)
        added |= new
    return added


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Two of them from one cluster, the older one not to be read."""
    folder, variant = tmp_path_factory.mktemp("chain"), Variant(ApiVersion.V2)
    objects: dict[str, dict[str, Objects]] = {}
    with live_cluster(folder / "source", ApiVersion.V2, stores=1, resolved_ts_interval=0.1, ts_ahead=0.3) as live:
        for number, name in enumerate(("older", "newer")):
            places = {part: folder / name / part for part in PARTS}
            load(live, rows(number))
            backup(options(variant, live, places["full"]))
            load(live, {key: value + b"changed" for key, value in list(rows(number).items())[::3]})
            back_up_changes(options(variant, live, places["increment"]), StorageLocation("local", str(places["full"])))
            without_log = contents(live)
            found = BackupSet.open(open_store(StorageLocation("local", str(places["increment"]))))
            end_ts = live.cluster.pd.tso() + 5 * STEP
            added = write_log(places["log"], live, found.backup_ts, end_ts, name.encode())
            objects[name] = {part: read_objects(place) for part, place in places.items()}
    return Chain(variant, objects["newer"], objects["older"], end_ts, without_log | added, without_log)


class Copy:
    """A copy of the chain that is damaged."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain = chain
        self.victims = {part: Victim(folder / part, chain.objects[part]) for part in PARTS}
        self.newest = self._place("increment")
        self.log = LogSource(self._place("log"), LOG_ID)

    def damaged(self, part: str, flips: int) -> Iterator[Case]:
        """Every case of a part, while it is done."""
        for case in cases(self._chain.objects[part], self._chain.older[part], lambda _: flips):
            self.victims[part].damage(case)
            yield case
            self.victims[part].mend(case)

    def _place(self, part: str) -> StorageLocation:
        return StorageLocation("local", str(self.victims[part].folder))


def is_found(case: Case) -> bool:
    """Whether it must be found: not what nobody reads, a bit that no row depends on, and a log that began earlier."""
    harmless = {("sst", "flipped"), ("log data", "flipped"), ("log description", "older")}
    return case.kind not in UNREAD and (case.kind, case.damage) not in harmless


def is_named(case: Case, error: TikvBrError) -> bool:
    """Whether an error names what was damaged; of a segment that is gone only the time is known."""
    if (case.kind, case.damage) == ("log segment", "missing"):
        return "no changes of" in error.message or "outside the restorable window" in error.message
    return any(Path(name).name in error.message for name in case.change)


def refusal(copy: Copy, chain: Chain, place: StorageLocation) -> TikvBrError | None:
    """Error of a merge."""
    try:
        merge_backup(MergeOptions(merged_to(place), copy.newest, copy.log, chain.end_ts))
    except TikvBrError as error:
        return error
    return None


@pytest.mark.parametrize("part", PARTS)
def test_a_merge_names_it(part: str, chain: Chain, tmp_path: Path) -> None:
    """Nothing that looks like a backup is left, and what is merged all the same has the right rows."""
    copy, seen, found = Copy(chain, tmp_path), set[tuple[str, str]](), 0
    for number, case in enumerate(copy.damaged(part, FLIPS)):
        place = StorageLocation("local", str(tmp_path / f"merged-{number}"))
        seen.add((case.kind, case.damage))
        error = refusal(copy, chain, place)
        if error is None:
            assert not is_found(case), str(case)
            assert rows_of(place) == chain.merged, str(case)
        else:
            assert is_named(case, error), (str(case), error)
            assert not (Path(place.path) / layout.META).exists(), str(case)
            found += 1
    assert len(seen) >= 3 * 6
    assert found > len(seen)
    sound = StorageLocation("local", str(tmp_path / "sound"))
    assert refusal(copy, chain, sound) is None
    assert rows_of(sound) == chain.merged


@pytest.mark.parametrize("part", ["full", "increment"])
def test_a_restore_of_a_chain_names_it(part: str, chain: Chain, tmp_path: Path) -> None:
    """Before the target has got a row; the sound chain is restored."""
    copy = Copy(chain, tmp_path)
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        for number, case in enumerate(copy.damaged(part, 0)):
            if is_found(case):
                work = StorageLocation("local", str(tmp_path / f"work-{number}"))
                with pytest.raises(BackupSetError) as caught:
                    restore_to_point(PointOptions(RestoreOptions(target.config, copy.newest), None, 0, work=work))
                assert is_named(case, caught.value), (str(case), caught.value)
                assert not list(tmp_path.glob(f"work-{number}/*/{layout.META}")), str(case)
        assert contents(target) == {}
        restore_to_point(PointOptions(RestoreOptions(target.config, copy.newest), None, 0))
        assert contents(target) == chain.without_log
