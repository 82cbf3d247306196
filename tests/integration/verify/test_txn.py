"""A live cluster held against a transactional backup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.live_txn_backups import back_up, codec_of, delete_range, hard_txn_rows, split_between, write_rows
from tests.support.live_txns import Txns
from tikv_br.backup.run import backup_txn
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.backupset.rows import find_value
from tikv_br.compare.files import FilePart, TxnComparison
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import BackupDamaged, ChecksumMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.rewrite import Rewrite
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import verify

ROWS = hard_txn_rows(40)
KEYS = sorted(ROWS)


@pytest.fixture(params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveCluster]:
    """A cluster with rows in four regions."""
    with live_cluster(tmp_path / "cluster", request.param, stores=2) as made:
        split_between(made, KEYS, 4)
        write_rows(made, ROWS)
        yield made


@pytest.fixture
def location(live: LiveCluster, tmp_path: Path) -> StorageLocation:
    """A backup of them."""
    return back_up(live, tmp_path / "backup")


def options(live: LiveCluster, location: StorageLocation) -> VerifyOptions:
    """Compare with that cluster."""
    return VerifyOptions(location, Level.RESTORE, live.config, executor="driver", concurrency=2)


def differences(live: LiveCluster, location: StorageLocation) -> list[Finding]:
    """A difference in the cluster."""
    found: list[Finding] = []
    with pytest.raises(ChecksumMismatch):
        verify(options(live, location), on_finding=found.append)
    return found


@pytest.mark.slow
def test_equal_rows_and_every_difference(live: LiveCluster, location: StorageLocation) -> None:
    """Locks and later versions of the same values are no difference; another value, a row less and a row more each are one."""
    txns = Txns(live, codec_of(live).prefix)
    backup = BackupSet.open(open_store(location), KeyMode.TXN)
    summary = verify(options(live, location))
    assert (summary.rows_checked, summary.ranges_compared) == (len(ROWS), len(backup.pairs))
    write_rows(live, {key: ROWS[key] for key in KEYS[::3]})
    txns.prewrite(b"row00000", ttl=1)
    assert verify(options(live, location)).rows_checked == len(ROWS)
    for change in ({KEYS[3]: b"other"}, {KEYS[-1]: None}, {b"not there before": b""}):
        write_rows(live, change)
        (found,) = differences(live, location)
        assert "of the cluster differs from" in found.cause
        assert found.object.endswith("_write.sst")
        write_rows(live, {key: ROWS.get(key) for key in change})
    delete_range(live)
    assert len(differences(live, location)) == len([pair for pair in backup.pairs if pair.sums.total_kvs])


def test_backups_by_tikv_br(live: LiveCluster, tmp_path: Path) -> None:
    """Every level passes, the index has the backup, each row is found; of a cluster rows that no file covers are found, too."""
    codec = codec_of(live)
    location = parse(f"local://{tmp_path / 'root' / 'ours'}")
    keyspaces = ("0",) if codec.is_v2 else ()
    done = backup_txn(
        BackupOptions(
            cluster=live.config,
            storage=location,
            key_mode=KeyMode.TXN,
            engine="auto",
            keyspaces=keyspaces,
            ranges=(KeyRange(b"aa", b"ab"), KeyRange(b"row", b"rox")),
            allow_empty=True,
            executor="driver",
        )
    )
    rows = {key: value for key, value in ROWS.items() if key.startswith(b"row")}
    assert done.summary.total_kvs == len(rows)
    for level in Level:
        summary = verify(structs.replace(options(live, location), level=level))
        assert summary.rows_checked == (len(rows) if level in {Level.DATA, Level.RESTORE} else 0)
    backup = BackupSet.open(open_store(location), KeyMode.TXN)
    for key, value in rows.items():
        found = find_value(backup, key)
        assert found is not None
        assert found.stored.value == value
    (listed,) = Index(open_store(parse(f"local://{tmp_path / 'root'}"))).read()
    assert (listed.entry.key_mode, listed.entry.total_kvs) == (KeyMode.TXN, len(rows))
    write_rows(live, {b"aa, not there before": b""})
    (found_row,) = differences(live, location)
    assert found_row.cause.startswith("the cluster holds 1 rows in")


def test_a_missing_file_of_values(live: LiveCluster, location: StorageLocation) -> None:
    """Its part cannot be compared, and is no difference of the cluster."""
    store = open_store(location)
    pair = next(pair for pair in BackupSet.open(store, KeyMode.TXN).pairs if pair.values)
    assert pair.values is not None
    store.delete(pair.values.name)
    found: list[Finding] = []
    with pytest.raises(BackupDamaged):
        verify(options(live, location), on_finding=found.append)
    assert found == [Finding(pair.values.name, "is missing", Level.META)]


def test_parts_under_other_keys(live: LiveCluster, location: StorageLocation, tmp_path: Path) -> None:
    """Files and parts of them are compared with rows of another keyspace, or under another prefix in V1."""
    backup = BackupSet.open(open_store(location), KeyMode.TXN)
    if backup.api_version is ApiVersion.V1:
        old, new, keyspace = b"row", b"copied/row", 0
    else:
        old, new, keyspace = b"", b"", 1
    codec = codec_of(live, keyspace)
    rewrite = Rewrite.of(codec_of(live), old, codec, new)
    copied = {new + key[len(old) :]: value for key, value in ROWS.items() if key.startswith(old)}
    write_rows(live, copied, keyspace)
    comparison = TxnComparison(live.cluster, open_store(location), backup.api_version)
    parts = [
        FilePart(pair.file, span, rewrite, pair.values)
        for pair in backup.pairs
        if not (
            span := KeyRange(
                max(pair.file.start_key, rewrite.source.start), least(pair.file.end_key, rewrite.source.end)
            )
        ).is_empty
    ]
    assert comparison.require_all_equal(parts, 2).total_kvs == len(copied)
    write_rows(live, {min(copied): b"other"}, keyspace)
    with pytest.raises(ChecksumMismatch, match="of the cluster differs from"):
        comparison.require_all_equal(parts, 2)
    del tmp_path


def least(one: bytes, other: bytes) -> bytes:
    """The smaller of two ends; empty is no end."""
    return min(one, other) if one and other else one or other
