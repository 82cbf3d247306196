"""The comparison of a file with a cluster that is a dictionary and a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastcrc
import pytest

from tests.support.sst_surgery import write_sst
from tests.support.stored_values import encode_value
from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.compare.files import BackupComparison, FilePart
from tikv_br.errors import BackupDamaged, ChecksumMismatch
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import ScanPage
from tikv_br.formats.values import StoredValue
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

CODEC = KeyCodec(ApiVersion.V1TTL)
Rows = dict[bytes, tuple[bytes, int]]
"""Value and absolute expiry (0 = never) by key."""
NOW = 1_795_257_267.5
"""The time by all clocks, in seconds since the epoch: it stands still, so that rows expire when a test has them expire."""


def sums(rows: Rows, now: float = 0) -> Checksum:
    """What a store counts at a moment."""
    pairs = [key + value for key, (value, expire) in rows.items() if not expire or expire > now]
    crc = 0
    for pair in pairs:
        crc ^= fastcrc.crc64.xz(pair)
    return Checksum(crc, len(pairs), sum(map(len, pairs)))


class FakeCluster:
    """Two regions, split at ``m``, each counted by its own look at the clock."""

    def __init__(self, rows: Rows, clock: Callable[[], float] = lambda: NOW) -> None:
        self.rows = rows
        self.asked: list[tuple[bytes, bytes]] = []
        self.scanned: list[tuple[bytes, bytes]] = []
        self.pd = SimpleNamespace(scan_regions=self._regions)
        self._clock = clock
        self.clock = SimpleNamespace(now=lambda: int(NOW), remark=lambda: "")

    def raw(self, _keyspace: int) -> Any:  # noqa: ANN401 - a client with one method
        """A client of the only keyspace."""
        return SimpleNamespace(
            codec=CODEC,
            now=self.clock.now,
            checksum=self._checksum,
            scan_pages=self._scan_pages,
            first_rpc_key=lambda span: min(self._keys(span.start, span.end), default=None),
            last_key=lambda span: max(self._keys(span.start, span.end), default=None),
            batch_get=lambda keys: {key: self.rows[key][0] for key in keys if key in self._keys(b"", b"")},
            get_ttl=self._ttl,
        )

    def _keys(self, start: bytes, end: bytes) -> list[bytes]:
        now = self._clock()
        return [
            key
            for key, (_value, expire) in sorted(self.rows.items())
            if key >= start and (not end or key < end) and (not expire or expire > now)
        ]

    def _ttl(self, key: bytes) -> int | None:
        if key not in self._keys(b"", b""):
            return None
        expire = self.rows[key][1]
        return expire - int(NOW) if expire else 0

    def _scan_pages(self, span: KeyRange) -> Iterator[ScanPage]:
        keys = self._keys(span.start, span.end)
        self.scanned.append((span.start, span.end))
        for page in [keys[at : at + 7] for at in range(0, len(keys), 7)]:
            yield ScanPage(columns.from_list(page), columns.from_list([self.rows[key][0] for key in page]))

    def _regions(self, start: bytes, end: bytes) -> list[SimpleNamespace]:
        bounds = [(b"", b"m"), (b"m", b"")]
        return [
            SimpleNamespace(start=low, end=high)
            for low, high in bounds
            if (not end or low < end) and (not high or high > start)
        ]

    def _checksum(self, span: KeyRange) -> Checksum:
        start, end = span.start, span.end
        self.asked.append((start, end))
        total = Checksum()
        for region in self._regions(start, end):
            here = {
                key: row
                for key, row in self.rows.items()
                if key >= max(start, region.start) and (not region.end or key < region.end) and (not end or key < end)
            }
            total += sums(here, self._clock())
        return total


def make(folder: Path, rows: Rows, *, recorded: bool) -> FileEntry:
    """An SST of the rows, with or without a record of what expires."""
    stored = [
        (b"z" + key, encode_value(ApiVersion.V1TTL, StoredValue(value, expire)))
        for key, (value, expire) in sorted(rows.items())
    ]
    data = write_sst(folder / "file.sst", stored)
    everything = sums(rows)
    expiring = {key: row for key, row in rows.items() if row[1]}
    apart = sums(expiring)
    times = [expire for _value, expire in expiring.values()] or [0]
    return FileEntry(
        "file.sst",
        len(data),
        b"",
        b"",
        everything.crc64xor,
        everything.total_kvs,
        everything.total_bytes,
        tail_sha256=b"recorded" if recorded else b"",
        expiry=Expiry(apart.total_kvs, apart.total_bytes, apart.crc64xor, min(times), max(times))
        if recorded
        else Expiry(),
    )


def prover(folder: Path, cluster: FakeCluster, *, recorded: bool = True) -> BackupComparison:
    """A prover of that folder's files."""
    store = open_store(parse(str(folder)))
    return BackupComparison(cluster, store, ApiVersion.V1TTL, expiry_recorded=recorded)  # type: ignore[arg-type]


def rows_that_expire(seconds: float) -> Rows:
    """Some that never expire, some that do after so many seconds."""
    expire = int(NOW + seconds)
    rows: Rows = {b"key%02d" % number: (b"value", 0) for number in range(20)}
    return rows | {b"short%02d" % number: (b"gone", expire) for number in range(20)}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("seconds", [3600, -3600, 0, 1, 2])
def test_expiry_breaks_no_comparison(tmp_path: Path, seconds: float, recorded: bool) -> None:
    """Rows expire later, have expired long ago, or do so right now: the cluster is what the backup is."""
    rows = rows_that_expire(seconds)
    file = make(tmp_path, rows, recorded=recorded)
    cluster = FakeCluster(rows)
    assert prover(tmp_path, cluster, recorded=recorded).require_equal(FilePart(file, file.key_range)).total_kvs in {
        20,
        40,
    }


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_recorded_expiry_spares_reading_the_file(tmp_path: Path, seconds: float) -> None:
    """Where nothing expires just now the record suffices: the file may even be gone."""
    rows = rows_that_expire(seconds)
    file = make(tmp_path, rows, recorded=True)
    (tmp_path / "file.sst").unlink()
    assert prover(tmp_path, FakeCluster(rows)).require_equal(FilePart(file, file.key_range)) == sums(rows, NOW)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("seconds", [3600, 1, -3600])
@pytest.mark.parametrize("change", ["missing", "altered", "extra"])
def test_a_difference_is_found_whatever_expires(tmp_path: Path, change: str, seconds: float, recorded: bool) -> None:
    """A lasting row that is missing, has another value, or is too many: the region that differs is named."""
    rows = rows_that_expire(seconds)
    file = make(tmp_path, rows, recorded=recorded)
    there = dict(rows)
    match change:
        case "missing":
            del there[b"key07"]
        case "altered":
            there[b"key07"] = (b"other", 0)
        case _:
            there[b"key077"] = (b"value", 0)
    with pytest.raises(ChecksumMismatch, match=r"\[start, 6d\).*file\.sst|\[start, end\).*file\.sst"):
        prover(tmp_path, FakeCluster(there), recorded=recorded).require_equal(FilePart(file, file.key_range))


def test_a_row_that_should_have_expired_is_a_difference(tmp_path: Path) -> None:
    """Rows that came back without their TTL do not vanish: that is no lawful difference."""
    rows = rows_that_expire(-3600)
    file = make(tmp_path, rows, recorded=True)
    without_ttl: Rows = {key: (value, 0) for key, (value, _expire) in rows.items()}
    with pytest.raises(ChecksumMismatch):
        prover(tmp_path, FakeCluster(without_ttl)).require_equal(FilePart(file, file.key_range))


def test_regions_may_answer_at_different_seconds(tmp_path: Path) -> None:
    """No single second fits the whole range, one for each region does."""
    now = int(NOW)
    rows: Rows = {b"a%02d" % number: (b"left", now + number - 5) for number in range(10)}
    rows |= {b"p%02d" % number: (b"right", now + number - 5) for number in range(10)}
    clocks = iter_clock([now - 1, now + 2])
    file = make(tmp_path, rows, recorded=True)
    cluster = FakeCluster(rows, lambda: next(clocks))
    found = prover(tmp_path, cluster).require_equal(FilePart(file, file.key_range))
    assert found == sums({k: r for k, r in rows.items() if k < b"m"}, now - 1) + sums(
        {k: r for k, r in rows.items() if k >= b"m"}, now + 2
    )


def iter_clock(times: list[int]) -> Iterator[int]:
    """Those times, again and again."""
    while True:
        yield from times


def test_a_part_of_a_file_is_compared_with_its_rows_only(tmp_path: Path) -> None:
    """The rest of the file's range may hold anything."""
    rows = rows_that_expire(3600)
    file = make(tmp_path, rows, recorded=True)
    there = {**rows, b"key00": (b"other", 0), b"short19": (b"other", 0)}
    part = KeyRange(b"key01", b"short19")
    assert prover(tmp_path, FakeCluster(there)).require_equal(FilePart(file, part)).total_kvs == 38
    with pytest.raises(ChecksumMismatch):
        prover(tmp_path, FakeCluster(there)).require_equal(FilePart(file, KeyRange(b"key01", b"short2")))


def test_a_file_that_has_to_be_read_must_be_sound(tmp_path: Path) -> None:
    """Damage is not taken for a difference."""
    rows = rows_that_expire(1)
    file = make(tmp_path, rows, recorded=False)
    data = bytearray((tmp_path / "file.sst").read_bytes())
    data[10] ^= 1
    (tmp_path / "file.sst").write_bytes(data)
    with pytest.raises(BackupDamaged, match=r"file\.sst"):
        prover(tmp_path, FakeCluster({}), recorded=False).require_equal(FilePart(file, file.key_range))


def test_rows_where_the_backup_has_none(tmp_path: Path) -> None:
    """An empty range must be empty."""
    cluster = FakeCluster({b"key": (b"value", 0)})
    assert prover(tmp_path, cluster).compare_empty(KeyRange(b"l", b"")) == ""
    assert "1 rows" in prover(tmp_path, cluster).compare_empty(KeyRange(b"", b""))


def test_differences_beside_expiring_rows_are_counted(tmp_path: Path) -> None:
    """The message counts each kind of difference and names the first key, while rows expire in the same range."""
    rows = rows_that_expire(1)
    file = make(tmp_path, rows, recorded=False)
    there = {**rows, b"key00": (b"other", 0), b"zzz": (b"new", 0)}
    del there[b"key03"]
    equal, difference = prover(tmp_path, FakeCluster(there), recorded=False).compare(FilePart(file, file.key_range))
    assert equal == Checksum()
    assert "1 rows are missing, 1 have another value, 1 are not in the backup" in difference
    assert difference.endswith(b"key00".hex())


def jitter(rows: Rows) -> Rows:
    """The same rows, each expiring up to two seconds before the recorded moment."""
    return {
        key: (value, expire - number % 3 if expire else 0) for number, (key, (value, expire)) in enumerate(rows.items())
    }


def test_rows_that_expire_each_at_a_second_of_their_own_are_compared_one_by_one(tmp_path: Path) -> None:
    """A backup asks for TTLs in whole seconds: no moment fits all of them, yet nothing is lost."""
    rows = rows_that_expire(1)
    file = make(tmp_path, rows, recorded=True)
    cluster = FakeCluster(jitter(rows))
    prover(tmp_path, cluster).require_equal(FilePart(file, file.key_range))
    assert cluster.scanned


@pytest.mark.parametrize("key", [b"short00", b"zlasting"])
def test_differences_are_found_row_by_row(tmp_path: Path, key: bytes) -> None:
    """Another value is a difference, of a row that is about to expire, too; so is a lasting row that is gone."""
    rows = rows_that_expire(2) | {b"zlasting": (b"value", 0), b"zother": (b"value", 0)}
    file = make(tmp_path, rows, recorded=True)
    there = {**jitter(rows), key: (b"other", rows[key][1] and rows[key][1] + 60)}
    assert "1 have another value" in prover(tmp_path, FakeCluster(there)).compare(FilePart(file, file.key_range))[1]
    del there[b"zlasting"]
    assert "1 rows are missing" in prover(tmp_path, FakeCluster(there)).compare(FilePart(file, file.key_range))[1]


def test_cuts_divide_a_file_into_requests(tmp_path: Path) -> None:
    """A whole file is asked for piece by piece, without a gap; the sums are those of one request."""
    rows: Rows = {b"key%02d" % number: (b"value", 0) for number in range(20)}
    file, cluster = make(tmp_path, rows, recorded=True), FakeCluster(rows)
    cuts = {file.name: (b"key05", b"key1")}
    divided = BackupComparison(cluster, open_store(parse(str(tmp_path))), ApiVersion.V1TTL, cuts, expiry_recorded=True)  # type: ignore[arg-type]
    assert divided.require_equal(FilePart(file, file.key_range)) == sums(rows)
    assert sorted(cluster.asked) == [(b"", b"key05"), (b"key05", b"key1"), (b"key1", b"")]
    del cluster.rows[b"key05"]
    with pytest.raises(ChecksumMismatch, match="19 rows"):
        divided.require_equal(FilePart(file, file.key_range))
