"""One seed of faulty storage: a full backup, its restore and its verification, each until it succeeds."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.backup.data import hard_rows
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.trust.commands import Tally, command
from tests.trust.dice import Dice
from tests.trust.faulty_storage import OPERATIONS, STREAMS, faulty_directories
from tikv_br.errors import (
    BackupDamaged,
    LeaseHeld,
    LeaseLost,
    ResumeRefused,
    StorageConflict,
    StorageUnreachable,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

ROWS = hard_rows(count=60)
REGIONS = 4
AGAIN = frozenset(
    error.exit_code
    for error in (StorageUnreachable, StorageConflict, LeaseHeld, LeaseLost, BackupDamaged, ResumeRefused)
)
"""Exit codes that a command may end with, because the storage failed or gave other bytes than it has."""


@dataclass(frozen=True)
class Pair:
    """A cluster with `ROWS` and an empty one."""

    source: LiveCluster
    target: LiveCluster


@contextlib.contextmanager
def clusters() -> Iterator[Pair]:
    """Both, in folders of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="storage-seeds-") as name,
        live_cluster(Path(name, "source"), ApiVersion.V2, stores=1) as source,
        live_cluster(Path(name, "target"), ApiVersion.V2, stores=1) as target,
    ):
        raw = source.raw()
        raw.batch_put(ROWS)
        keys = sorted(ROWS)
        source.split(*(raw.codec.bound(raw.codec.rpc_key(key)) for key in keys[:: len(keys) // REGIONS][1:]))
        yield Pair(source, target)


def _arm(pair: Pair, seed: int) -> None:
    """Have the stores' own reads and writes fail at the same rates."""
    failed, lost = ({"storage_error": {"message": "SlowDown", "after": after}} for after in (False, True))
    for live, point, action, chance in (
        (pair.source, "storage.write", failed, OPERATIONS / 2),
        (pair.source, "storage.write", lost, OPERATIONS / 2),
        (pair.target, "storage.read", failed, OPERATIONS),
        (pair.target, "storage.read", {"cut": {}}, STREAMS / 2),
        (pair.target, "storage.read", {"flip": {}}, STREAMS / 2),
    ):
        live.fail(point, action, count=-1, chance=chance, seed=seed)


def _disarm(pair: Pair, dice: Dice) -> None:
    """Book what struck stores with what struck us."""
    for live in (pair.source, pair.target):
        for failpoint in live.get("failpoints"):
            [kind] = failpoint["action"]
            dice.struck += Counter({f"{kind.replace('_', ' ')} at a store": failpoint["hits"]})
        live.disarm()


def run_seed(pair: Pair, seed: int) -> Tally:
    """Back up, verify and restore under faults, then see without them that all is as it should be."""
    tally, dice = Tally(), Dice(seed)
    pair.target.raw().delete_range(EVERY_KEY)
    engine, mode = ("scan", "store")[seed % 2], ("ingest", "put")[seed // 2 % 2]
    with tempfile.TemporaryDirectory(prefix="storage-seed-") as folder:
        place = ("--storage", f"local://{folder}/backup")
        here = ("--executor", "driver")
        _arm(pair, seed)
        with faulty_directories(dice):
            source = ("--pd", pair.source.pd, "--safe-interval", "0s", "--engine", engine)
            tally.insist("backup", "backup", "raw", *place, *source, *here, allowed=AGAIN)
            target = ("--pd", pair.target.pd, "--mode", mode)
            tally.insist("verify", "verify", *place, "--level", "data", *here, allowed=AGAIN)
            tally.insist("restore", "restore", "raw", *place, *target, *here, allowed=AGAIN)
            tally.insist("verify", "verify", *place, "--level", "restore", "--pd", pair.target.pd, *here, allowed=AGAIN)
        dice.rest()
        _disarm(pair, dice)
        found = command("verify", *place, "--level", "data", *here)
        assert not found.code, f"the backup is not what its command said: {found.error}"
    assert contents(pair.target) == ROWS, "the target does not hold what the source holds"
    tally.operations, tally.faults = dice.thrown, dice.struck
    return tally
