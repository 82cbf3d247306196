"""History of each key of a cluster, read from a playground's RocksDB, and checks of a sync's promises.

Two syncs may write a key twice, and late; what none may do is turn a key back to what it was before a checkpoint that had
passed a newer value. Stores of API V2 keep every version with its timestamp, so that the target itself remembers all.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from rocksdict import AccessType, Options, Rdict

from tests.support.background import Background

_MAX_TS = (1 << 64) - 1
_GROUP, _MARK = 8, 0xFF


class Version(NamedTuple):
    """State of a key from a timestamp on; None = deleted, which may also come from an expiry."""

    ts: int
    value: bytes | None
    expires: bool = False
    expire_ts: int = 0
    """Seconds since the epoch; 0 = never."""


History = dict[bytes, list[Version]]
"""By user key, oldest first."""


class Passed(NamedTuple):
    """A checkpoint that had been saved when the target's clock stood at ``target_ts``."""

    target_ts: int
    checkpoint_ts: int


def read(playground: Path, scratch: Path, keyspace_id: int = 0) -> History:
    """All versions of one keyspace of a playground of API V2, also a running one; `scratch` is a folder to be made."""
    options = Options(raw_mode=True)
    database = Rdict(str(playground / "rocksdb"), options, access_type=AccessType.secondary(str(scratch)))
    prefix = b"r" + keyspace_id.to_bytes(3, "big")
    found: defaultdict[bytes, list[Version]] = defaultdict(list)
    for key, value in cast("Iterator[tuple[bytes, bytes]]", database.items(from_key=b"zr")):
        if not key.startswith(b"zr"):
            break
        rpc_key, ts = _parse_key(key[1:])
        if rpc_key.startswith(prefix):
            found[rpc_key[len(prefix) :]].append(Version(ts, *_parse_value(value)))
    database.close()
    return {key: versions[::-1] for key, versions in found.items()}  # newer ones lie first


class CheckpointWatch(Background):
    """Notes checkpoints as they are saved, and fails at the end when one of them was older than one before."""

    def __init__(self, checkpoint: Callable[[], int], target_tso: Callable[[], int], every: float = 0.02) -> None:
        """`checkpoint` gives what is saved, 0 before the first; `target_tso` is the clock of the target's PD."""
        super().__init__([(self._look, every)])
        self.passed: list[Passed] = []
        self._checkpoint, self._target_tso = checkpoint, target_tso

    def _look(self) -> None:
        saved = self._checkpoint()
        before = self.passed[-1].checkpoint_ts if self.passed else 0
        assert saved >= before, f"the checkpoint went back from {before} to {saved}"
        if saved > before:
            self.passed.append(Passed(self._target_tso(), saved))


def check(source: History, target: History, passed: Sequence[Passed]) -> int:
    """Fail when the target ever showed what the source never held, or what a checkpoint passed before had left behind.

    A value must be unique among those of its key. A delete is taken for the latest one that it can be, or for the end of the
    latest row that expires. Returns how many versions of the target were held against a checkpoint.
    """
    held = 0
    for key, versions in target.items():
        origin = source.get(key, [])
        stamps = [version.ts for version in origin]
        latest = {version.value: version.ts for version in origin}
        latest.update((None, version.ts) for version in origin if version.value is None or version.expires)
        for version in versions:
            assert version.value in latest, f"{key!r} was never {version.value!r} at the source"
            at = bisect.bisect_left(passed, (version.ts, 0))
            count = bisect.bisect_right(stamps, passed[at - 1].checkpoint_ts) if at else 0
            held += bool(count)
            assert not count or latest[version.value] >= stamps[count - 1], (
                f"{key!r} went back to {version.value!r} of {latest[version.value]} after the checkpoint "
                f"{passed[at - 1].checkpoint_ts} had passed {origin[count - 1]}"
            )
    return held


def assert_same_end(source: History, target: History) -> None:
    """Fail unless both end with the same live rows."""
    ends = [
        {key: end for key, versions in each.items() if (end := versions[-1].value) is not None}
        for each in (source, target)
    ]
    assert ends[0] == ends[1]


def _parse_key(key: bytes) -> tuple[bytes, int]:
    """The RPC key and the ts of a storage key: groups of eight bytes, each with a mark of how much of it counts."""
    parts, at = [], 0
    while True:
        group, mark = key[at : at + _GROUP], key[at + _GROUP]
        at += _GROUP + 1
        parts.append(group[: _GROUP - (_MARK - mark)])
        if mark != _MARK:
            return b"".join(parts), _MAX_TS - int.from_bytes(key[at:], "big")


def rows_at(source: History, ts: int) -> dict[bytes, bytes]:
    """Rows visible at a timestamp."""
    found = {}
    for key, versions in source.items():
        newest = max((each for each in versions if each.ts <= ts), default=None)
        if newest is not None and newest.value is not None and not 0 < newest.expire_ts <= (ts >> 18) // 1000:
            found[key] = newest.value
    return found


def _parse_value(value: bytes) -> tuple[bytes | None, bool, int]:
    """The user's value, and whether it expires; behind it stand the expiry, if bit 0 of the last byte says so, and that byte.

    Bit 1: deleted.
    """
    flags = value[-1]
    if flags & 2:
        return None, False, 0
    return (value[:-9], True, int.from_bytes(value[-9:-1], "big")) if flags & 1 else (value[:-1], False, 0)
