"""Restores into other keyspaces and under other prefixes: every row under its new name, proven, and nothing else."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastcrc import crc64

from tests.integration.backup.data import load, when
from tests.integration.backup.reading import golden_rows
from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.integration.restore.restores import break_off, restore_golden
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import ChecksumMismatch, ClusterUnfit, NothingMatched, TargetNotEmpty, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.progress_events import StepStarted
from tikv_br.restore.inspect import FileCheck
from tikv_br.restore.options import Mode, RestoreOptions, Via
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.storage.url import StorageLocation, parse


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster; each test has keyspaces of its own."""
    with live_cluster(tmp_path_factory.mktemp("rewrite"), ApiVersion.V2, stores=1) as live:
        yield live


def run(live: LiveCluster, location: StorageLocation, **changes: object) -> RestoreSummary:
    """Restore with other settings."""
    return restore(RestoreOptions(cluster=live.config, storage=location, **changes))  # type: ignore[arg-type]


def summed(rows: dict[bytes, bytes], prefix: bytes) -> tuple[int, int, int]:
    """RawChecksum by its definition: a row, a CRC; XOR of all; number of rows and of bytes."""
    total = 0
    for key, value in rows.items():
        total ^= crc64.xz(prefix + key + value)
    return total, len(rows), sum(len(prefix + key + value) for key, value in rows.items())


@pytest.mark.parametrize(
    ("name", "source", "to_keyspace"),
    [
        ("v2", 0, "ks4242"),
        pytest.param(
            "v2_ks4242_rpc", 4242, "ks16777215", marks=pytest.mark.emulator_only("a keyspace of a certain id")
        ),
    ],
)
def test_a_recorded_keyspace_becomes_another(
    golden: Path, live: LiveCluster, name: str, source: int, to_keyspace: str
) -> None:
    """All rows and TTLs are in the new keyspace, the servers' checksum is the one of the new keys, elsewhere is nothing."""
    target = live.create_keyspace(to_keyspace)
    before = live.raw(source).checksum()
    expected = golden_rows(golden / "backups" / name)
    rows = {row["k"][4:]: row["v"] for row in expected}
    summary = restore_golden(live, golden, name, to_keyspace=str(target))
    assert rows_of(live, target) == rows
    found = live.raw(target).checksum()
    assert (found.crc64xor, found.total_kvs, found.total_bytes) == summed(rows, KeyCodec(ApiVersion.V2, target).prefix)
    assert summary.verified
    assert (summary.crc64xor, summary.total_bytes) == (found.crc64xor, found.total_bytes)
    assert live.raw(source).checksum() == before
    ttls = [row for row in expected if row["e"]][:20]
    now = time.time()
    assert all(abs((live.raw(target).get_ttl(row["k"][4:]) or 0) - (row["e"] - now)) < 30 for row in ttls)


def test_a_keyspace_is_found_by_name(source: StorageLocation, live: LiveCluster) -> None:
    """PD knows the names; one that it does not know is a wrong flag."""
    connection = http.client.HTTPConnection(live.pd, timeout=30)
    connection.request("POST", "/pd/api/v2/keyspaces", json.dumps({"name": "tenant"}))
    keyspace_id = json.loads(connection.getresponse().read())["id"]
    connection.close()
    assert run(live, source, to_keyspace="tenant").verified
    assert rows_of(live, keyspace_id) == ROWS
    with pytest.raises(UsageError, match="nobody"):
        run(live, source, to_keyspace="nobody")
    again = run(live, source, to_keyspace=str(keyspace_id))
    assert again.resumed_files == again.files


def test_regions_of_the_target_cut_the_files(source: StorageLocation, live: LiveCluster) -> None:
    """Bounds of the target's regions are its own: files are cut at what they mean in the backup."""
    keyspace = live.create_keyspace("ks70")
    codec = KeyCodec(ApiVersion.V2, keyspace)
    places = [codec.bound(codec.rpc_key(key)).hex() for key in sorted(ROWS)[10 :: len(ROWS) // 7]]
    live.split(*map(bytes.fromhex, places))
    start, end = sorted(ROWS)[100], sorted(ROWS)[-100]
    summary = run(live, source, to_keyspace="ks70", span=KeyRange(start, end))
    assert summary.regions > summary.files
    assert rows_of(live, keyspace) == {key: value for key, value in ROWS.items() if start <= key < end}


PREFIXES = {
    b"row0": b"line",
    b"prefix": b"prefix/of-14-b",
    b"row00012": b"",
    b"": b"eight---",
    b"\xff": b"\xfe",
}


@pytest.mark.parametrize(("number", "old"), list(enumerate(PREFIXES, 100)))
def test_a_prefix_becomes_another(source: StorageLocation, live: LiveCluster, number: int, old: bytes) -> None:
    """Stores rewrite where the lengths allow it; only the keys with the prefix come."""
    keyspace = live.create_keyspace(f"ks{number}")
    summary = run(live, source, to_keyspace=str(keyspace), rewrite_prefix=(old, PREFIXES[old]))
    wanted = {PREFIXES[old] + key[len(old) :]: value for key, value in ROWS.items() if key.startswith(old)}
    assert rows_of(live, keyspace) == wanted
    assert summary.verified
    assert summary.total_kvs == len(wanted) > 0


@pytest.mark.parametrize(
    "choice",
    [
        {"rewrite_prefix": (b"nokey-", b"nokey+")},
        {"span": KeyRange(b"nokey-", b"nokey.")},
        {"span": KeyRange(b"row00010a", b"row00010b")},
    ],
)
def test_a_part_of_a_backup_without_a_row_is_refused(
    source: StorageLocation, live: LiveCluster, choice: dict[str, Any]
) -> None:
    """Before anything changes, also in a dry run; also if the range lies inside a file."""
    live.create_keyspace("ks210")
    for dry_run in (True, False):
        with pytest.raises(NothingMatched, match="the backup has no row from"):
            run(live, source, to_keyspace="ks210", dry_run=dry_run, **choice)
    assert run(live, source, to_keyspace="ks210", allow_empty=True, **choice).total_kvs == 0


def test_prefixes_that_stores_cannot_rewrite_are_put(source: StorageLocation, live: LiveCluster) -> None:
    """In V2 a prefix of another length would shift the groups of the encoding: refused, unless rows are put."""
    keyspace = live.create_keyspace("ks200")
    changes = {"to_keyspace": "ks200", "rewrite_prefix": (b"row", b"a row that is ")}
    with pytest.raises(UsageError, match="multiple of 8"):
        run(live, source, **changes)
    assert run(live, source, mode=Mode.PUT, **changes).verified
    wanted = {b"a row that is " + key[3:]: value for key, value in ROWS.items() if key.startswith(b"row")}
    assert rows_of(live, keyspace) == wanted


def test_a_changed_row_is_found(source: StorageLocation, live: LiveCluster) -> None:
    """The recorded sums are of other keys: the comparison reads the files, and finds one wrong value."""
    keyspace = live.create_keyspace("ks300")
    spoil = when(StepStarted, "ingest", lambda: live.raw(keyspace).put(b"row00300", b"another"))
    with pytest.raises(ChecksumMismatch):
        restore(RestoreOptions(cluster=live.config, storage=source, to_keyspace="ks300"), spoil)


def test_a_rewriting_restore_goes_on_too(source: StorageLocation, live: LiveCluster) -> None:
    """Finished parts are recorded with the backup's keys, and looked up with the target's."""
    break_off(live, source, to_keyspace="400")
    with pytest.raises(TargetNotEmpty):
        run(live, source, to_keyspace="400", resume=False)
    assert run(live, source, to_keyspace="401").resumed_files == 0  # its records are others
    summary = run(live, source, to_keyspace="400")
    assert FILES // 2 <= summary.resumed_files < summary.files
    assert rows_of(live, 400) == rows_of(live, 401) == ROWS


def test_prefixes_of_any_length_are_rewritten_by_v1_stores(golden: Path, tmp_path: Path) -> None:
    """Keys of V1 are not encoded: a longer, a shorter and no prefix at all do as well."""
    rows = {row["k"]: row["v"] for row in golden_rows(golden / "backups" / "v1")}
    old = max((key[:1] for key in rows), key=lambda first: sum(key.startswith(first) for key in rows))
    with live_cluster(tmp_path / "v1", ApiVersion.V1, stores=1) as v1:
        for new in (b"longer/", b""):
            summary = restore_golden(v1, golden, "v1", rewrite_prefix=(old, new))
            wanted = {new + key[len(old) :]: value for key, value in rows.items() if key.startswith(old)}
            assert summary.verified
            assert rows_of(v1) == wanted
            v1.raw().delete_range(EVERY_KEY)
        for new in (b"\xff", b"\xff\xff"):  # no key is above those with it
            with pytest.raises(UsageError, match="--rewrite-prefix: stores cannot replace a prefix by"):
                restore_golden(v1, golden, "v1", rewrite_prefix=(old, new), via=Via.STORES)
            assert restore_golden(v1, golden, "v1", rewrite_prefix=(old, new)).uploaded_files
            assert rows_of(v1) == {new + key[len(old) :]: value for key, value in rows.items() if key.startswith(old)}
            v1.raw().delete_range(EVERY_KEY)
        with pytest.raises(UsageError, match="keyspace"):
            restore_golden(v1, golden, "v1", to_keyspace="1")


def test_keys_that_become_too_long(tmp_path: Path) -> None:
    """Stores ingest keys of more than 8,192 bytes, and refuse puts and deletes of them: no way by which the rows are read here restores one."""
    place, old, short = parse(f"local://{tmp_path / 'backup'}"), b"k" * 8000, b"kz"
    ways: list[dict[str, Any]] = [{"file_check": FileCheck.CONTENT}, {"via": Via.UPLOAD}, {"mode": Mode.PUT}]
    with live_cluster(tmp_path / "v1", ApiVersion.V1, stores=1) as v1:
        v1.raw().batch_put({old: b"value", short: b"value"})
        backup(BackupOptions(v1.config, place, executor="driver"))
        for size, way in itertools.product((193, 194), ways):
            new = b"l" * size + old[1:]
            wanted = RestoreOptions(v1.config, place, rewrite_prefix=(b"k", b"l" * size), resume=False, **way)
            if size == 193:
                assert restore(wanted).verified
                v1.raw().batch_delete([new, b"l" * size + short[1:]])
                continue
            with pytest.raises(ClusterUnfit, match="no client could overwrite or delete it") as raised:
                restore(wanted)
            assert (b"k" * 8).hex() in raised.value.message or (b"l" * 8).hex() in raised.value.message
            assert v1.raw().get(new) is None
        wanted = RestoreOptions(v1.config, place, rewrite_prefix=(short, b"m" * 194), file_check=FileCheck.CONTENT)
        assert restore(wanted).verified  # the other row of the file is not wanted


def test_one_keyspace_of_several(live: LiveCluster, tmp_path: Path) -> None:
    """A backup of several keyspaces gives one of them, under its own id or another; all at once cannot become one."""
    location = parse(f"local://{tmp_path / 'several'}")
    first, second, third = (live.create_keyspace(name) for name in ("ks500", "ks501", "ks502"))
    kept = {keyspace: {b"key of %d" % keyspace: b"value"} for keyspace in (first, second)}
    for keyspace, rows in kept.items():
        load(live, rows, keyspace)
    backup(BackupOptions(live.config, location, keyspaces=("ks500", "ks501"), safe_interval=0.0, executor="driver"))
    with pytest.raises(UsageError, match="several keyspaces"):
        run(live, location, to_keyspace="ks502")
    assert run(live, location, keyspace=second, to_keyspace="ks502").verified
    assert rows_of(live, third) == kept[second]
    live.raw(first).delete_range(EVERY_KEY)
    assert run(live, location, keyspace=first).verified
    assert rows_of(live, first) == kept[first]
    with pytest.raises(UsageError, match="no part of the requested range") as raised:
        run(live, location, keyspace=7)
    assert "tikv-br show --view ranges" in raised.value.hint
