"""Several keyspaces and ranges in one backup: what is in it, and that all that reads backups takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.data import load
from tests.integration.backup.reading import Rows, rocksdb_rows, stored
from tests.support.live_cluster import LiveCluster
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.rows import find_value
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.options import Loss
from tikv_br.dataflow.plan import keyspaces_with_data
from tikv_br.errors import ConversionUnsupported, NothingMatched, RequestRefused, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.sst.compression import Compression
from tikv_br.progress_events import Event, Notice
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify

V1, V2 = ApiVersion.V1, ApiVersion.V2
KEYSPACES = ("DEFAULT", "ks7", "ks8", "ks4242", "ks16777215")
"""Neighbours, and on a playground a far one, and the last with its odd end."""


def ids_of(live: LiveCluster, names: tuple[str, ...] = KEYSPACES) -> tuple[int, ...]:
    """The ids of keyspaces, which PD chooses, in their order."""
    return tuple(sorted(live.create_keyspace(name) for name in names))


def rows_of(keyspace: int) -> dict[bytes, bytes]:
    """Rows that differ from keyspace to keyspace, from the first possible key to a late one."""
    keys = [b"", b"\xff" * 9, *(b"k%03d" % number for number in range(100))]
    return {key: b"%d of " % keyspace + key for key in keys}


@pytest.fixture(scope="module")
def live(clusters: Clusters) -> LiveCluster:
    """A V2 cluster with rows in each keyspace, split within one of them."""
    live = clusters(V2)
    for keyspace in ids_of(live):
        load(live, rows_of(keyspace), keyspace)
    codec = KeyCodec(V2, live.create_keyspace("ks7"))
    live.split(*(codec.bound(codec.rpc_key(key)) for key in (b"k030", b"k060")))
    return live


def expected(keyspaces: tuple[int, ...], ranges: tuple[KeyRange, ...], ts: int) -> Rows:
    """The internal rows of all keyspaces and ranges, at one ts."""
    found: Rows = {}
    for keyspace in keyspaces:
        wanted = {
            key: (value, 0)
            for key, value in rows_of(keyspace).items()
            if any(span.start <= key and (not span.end or key < span.end) for span in ranges)
        }
        found |= stored(wanted, V2, keyspace_id=keyspace, ts=ts)
    return found


@pytest.mark.parametrize("engine", ["scan", "store"])
@pytest.mark.parametrize(
    ("names", "chosen", "ranges"),
    [
        (("all",), KEYSPACES, (EVERY_KEY,)),
        (
            ("ks8", "ks7", "DEFAULT", "0"),
            ("DEFAULT", "ks7", "ks8"),
            (KeyRange(b"k050", b"k070"), KeyRange(b"", b"k010"), KeyRange(b"k099\0", b"")),
        ),
        (("ks16777215",), ("ks16777215",), (KeyRange(b"k099\0", b""), KeyRange(b"", b"k010"))),
    ],
)
def test_every_row_of_every_range_is_there_and_no_other(
    engine: str,
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    ranges: tuple[KeyRange, ...],
    live: LiveCluster,
    options: Options,
    tmp_path: Path,
) -> None:
    """In any order of flags, a repeated keyspace counts once; records and backupmeta list each range."""
    keyspaces = ids_of(live, chosen)
    wanted = options(live, engine=engine, keyspaces=names, ranges=ranges, checksum=True)
    summary = backup(wanted).summary
    ts = summary.backup_ts
    found = {
        key[:-8] + (ts ^ (2**64 - 1)).to_bytes(8, "big"): value
        for key, value in rocksdb_rows(Path(wanted.storage.path), tmp_path).items()
    }
    assert found == expected(keyspaces, ranges, ts)
    kept = BackupSet.open(open_store(wanted.storage))
    assert kept.manifest is not None
    assert kept.manifest.description.keyspaces == keyspaces
    spans = [KeyCodec(V2, keyspace).rpc_range(span) for keyspace in keyspaces for span in sorted(ranges)]
    assert list(kept.ranges) == list(kept.manifest.description.source_ranges) == spans
    meta = brpb_pb2.BackupMeta.FromString((Path(wanted.storage.path) / "backupmeta").read_bytes())
    assert [(part.start_key, part.end_key, part.cf) for part in meta.raw_ranges] == [
        (span.start, span.end, "default") for span in spans
    ]


def emptied(targets: Clusters) -> LiveCluster:
    """The cluster to restore into, without the rows of other tests."""
    live = targets(V2)
    for keyspace in list(keyspaces_with_data(live.cluster, KeyMode.RAW)):
        live.raw(keyspace).delete_range(EVERY_KEY)
    return live


def test_all_that_reads_backups_reads_it(live: LiveCluster, targets: Clusters, options: Options) -> None:
    """Verify at every level, cat, and a restore into another cluster, keyspace by keyspace."""
    wanted = options(live, keyspaces=("all",), ranges=(KeyRange(b"", b"k010"), KeyRange(b"k050", b"")))
    summary = backup(wanted).summary
    for level in Level:
        cluster = live.config if level is Level.RESTORE else None
        verify(VerifyOptions(wanted.storage, level, cluster, executor="driver"))
    kept = BackupSet.open(open_store(wanted.storage))
    for keyspace in ids_of(live):
        hit = find_value(kept, b"k050", keyspace)
        assert hit is not None
        assert hit.stored.value == rows_of(keyspace)[b"k050"]
        with pytest.raises(UsageError):
            find_value(kept, b"k010", keyspace)
    target = emptied(targets)
    assert ids_of(target) == ids_of(live), "PD counts upwards"
    restored = restore(RestoreOptions(target.config, wanted.storage))
    assert restored.verified
    assert restored.total_kvs == summary.total_kvs
    for keyspace in ids_of(live):
        inside = {key: value for key, value in rows_of(keyspace).items() if key < b"k010" or key >= b"k050"}
        assert target.raw(keyspace).batch_get(rows_of(keyspace)) == inside


def test_versions_without_keyspaces(live: LiveCluster, clusters: Clusters, options: Options) -> None:
    """Several would be mixed; one goes, and becomes all of it; a cluster without has none to name."""
    allowed = frozenset(Loss)
    with pytest.raises(ConversionUnsupported, match="{}, {} would be mixed".format(*ids_of(live, ("ks7", "ks8")))):
        backup(options(live, keyspaces=("ks7", "ks8"), dst_api_version=V1, allow_loss=allowed))
    wanted = options(live, keyspaces=("ks4242",), dst_api_version=V1, allow_loss=allowed)
    summary = backup(wanted).summary
    assert summary.total_kvs == len(rows_of(live.create_keyspace("ks4242")))
    assert BackupSet.open(open_store(wanted.storage)).ranges == (KeyRange(b"", b""),)
    with pytest.raises(UsageError, match="no keyspaces"):
        backup(options(clusters(V1), keyspaces=("all",)))


def test_all_of_an_empty_cluster_is_the_default_keyspace(targets: Clusters, options: Options) -> None:
    """A backup covers something, also where nothing is; but nothing is what only few want to back up."""
    live = emptied(targets)
    for keyspaces in (("all",), ()):
        with pytest.raises(NothingMatched, match="the cluster has no row"):
            backup(options(live, keyspaces=keyspaces))
    wanted = options(live, keyspaces=("all",), allow_empty=True)
    assert backup(wanted).summary.total_kvs == 0
    assert BackupSet.open(open_store(wanted.storage)).ranges == (KeyRange(b"r\0\0\0", b"r\0\0\1"),)


def test_rows_that_a_backup_leaves_out(targets: Clusters, options: Options) -> None:
    """A warning has the keyspaces by name and their rows, up to 1,000; it is none if keyspaces were named."""
    live = emptied(targets)
    other, billing = live.create_keyspace("ks8"), live.create_keyspace("billing")

    def warnings(**changes: object) -> list[tuple[str, bool]]:
        events: list[Event] = []
        backup(options(live, dry_run=True, allow_empty=True, **changes), events.append)
        return [
            (each.message, each.warning) for each in events if isinstance(each, Notice) and "leaves out" in each.message
        ]

    assert warnings() == []
    live.raw(billing).batch_put({b"%04d" % number: b"v" for number in range(3000)})
    live.raw(other).put(b"k", b"v")
    live.raw(0).put(b"k", b"v")
    [(message, is_warning)] = warnings()
    assert is_warning
    assert f"leaves out: ks8 ({other}), 1 row, billing ({billing}), more than 1,000 rows; --keyspace" in message
    [(message, is_warning)] = warnings(keyspaces=("billing",))
    assert not is_warning
    assert "leaves out: 0" in message
    assert warnings(keyspaces=("all",)) == []
    live.raw(0).delete(b"k")
    with pytest.raises(NothingMatched):  # where only other keyspaces have rows
        backup(options(live))


def test_several_ranges_of_a_cluster_without_keyspaces(clusters: Clusters, options: Options, tmp_path: Path) -> None:
    """Also for API V1, unbounded at either end."""
    live = clusters(V1)
    load(live, rows_of(0))
    ranges = (KeyRange(b"", b"k010"), KeyRange(b"k090", b""))
    wanted = options(live, ranges=ranges)
    backup(wanted)
    inside = {key: (value, 0) for key, value in rows_of(0).items() if key < b"k010" or key >= b"k090"}
    assert rocksdb_rows(Path(wanted.storage.path), tmp_path) == stored(inside, V1)
    kept = BackupSet.open(open_store(wanted.storage))
    assert kept.ranges == ranges


def test_it_goes_on_after_a_failure(live: LiveCluster, options: Options, tmp_path: Path) -> None:
    """Keyspaces that are done stay done, rewritten files too; nothing of the stores' own files is left in the end."""
    wanted = options(live, engine="store", compression=Compression.NONE, keyspaces=("all",), concurrency=1)
    failing = live.fail("backup.region", {"abort": {"code": "INVALID_ARGUMENT", "details": "no"}}, skip=5, count=-1)
    with pytest.raises(RequestRefused):
        backup(wanted)
    assert live.hits(failing) > 0
    live.heal()
    summary = backup(wanted).summary
    assert 0 < summary.resumed_ranges < summary.ranges
    assert "rewritten" in summary.engine_reason
    ts = summary.backup_ts
    found = rocksdb_rows(Path(wanted.storage.path), tmp_path)
    restamped = {key[:-8] + (ts ^ (2**64 - 1)).to_bytes(8, "big"): value for key, value in found.items()}
    assert restamped == expected(ids_of(live), (EVERY_KEY,), ts)
    kept = BackupSet.open(open_store(wanted.storage))
    assert {path.name for path in Path(wanted.storage.path).rglob("*.sst")} == {
        file.name.rpartition("/")[2] for file in kept.files
    }
