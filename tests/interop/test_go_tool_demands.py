"""Every kind of backup that we write meets what the Go TiKV-BR demands, as its own backups do, field by field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.integration.s3_servers import BUCKET, S3Server, versitygw_server
from tests.interop.conftest import Clusters
from tests.interop.rows import YEAR, rows, split
from tests.support.go_tool_demands import META, Directory, fields, unmet_demands
from tests.support.live_cluster import LiveCluster
from tests.support.openssl import KEYS, crypter
from tests.unit.formats.sst.tables import sst_dump
from tikv_br.backup.run import backup
from tikv_br.backupset.files import FileKind
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.options import BackupOptions, Loss
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.sst.compression import Compression
from tikv_br.storage.url import StorageLocation

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
GOLDEN = {
    "v1": V1, "v1_lz4": V1, "v1_snappy": V1, "v1_to_v2": V2, "v1ttl": V1TTL, "v1ttl_to_v2": V2, "v2": V2, "v2_3stores": V2,
}  # fmt: skip
UNHEEDED = {"end_version", "files.cipher_iv"}
"""Fields that the tool does not look at: ours holds backup-ts; stores put a cipher_iv also where nothing is encrypted."""


def golden_backup(golden: Path, name: str) -> Directory:
    """Return a backup that the Go tool wrote."""
    return Directory.local(golden / "backups" / name / "data")


@pytest.mark.parametrize("name", GOLDEN)
def test_its_own_backups_meet_the_demands(golden: Path, name: str) -> None:
    """Nothing is demanded that the tool's own backups do not have."""
    assert unmet_demands(golden_backup(golden, name), GOLDEN[name]) == []


def test_a_part_meets_them_when_asked_for_by_its_range(golden: Path) -> None:
    """A backup of a range restores by --start and --end; without them the tool refuses it."""
    part = golden_backup(golden, "v2_ranged")
    (said,) = part.meta.raw_ranges
    assert unmet_demands(part, V2, said.start_key[4:], said.end_key[4:]) == []
    assert any("does not cover" in demand for demand in unmet_demands(part, V2))


def first_file(change: Callable[[brpb_pb2.File], object]) -> Callable[[brpb_pb2.BackupMeta], object]:
    """Return a change of a meta that changes its first file."""
    return lambda meta: change(meta.files[0])


BREAKING: dict[str, tuple[Callable[[brpb_pb2.BackupMeta], Any], str]] = {
    "not raw": (lambda meta: meta.ClearField("is_raw_kv"), "non-rawkv is unsupported"),
    "no api version": (lambda meta: meta.ClearField("api_version"), "Unsupported backup api version"),
    "no range": (lambda meta: meta.ClearField("raw_ranges"), "no backup data in the range"),
    "range without cf": (lambda meta: meta.raw_ranges[0].ClearField("cf"), "no backup data in the range"),
    "file without cf": (first_file(lambda file: file.ClearField("cf")), "left out without a word"),
    "no start": (first_file(lambda file: file.ClearField("start_key")), "slice bounds out of range"),
    "no end": (first_file(lambda file: file.ClearField("end_key")), "slice bounds out of range"),
    "no crc": (first_file(lambda file: file.ClearField("crc64xor")), "Checksum mismatch"),
    "rows": (first_file(lambda file: setattr(file, "total_kvs", file.total_kvs + 1)), "Checksum mismatch"),
    "bytes": (first_file(lambda file: file.ClearField("total_bytes")), "Checksum mismatch"),
    "too large": (first_file(lambda file: setattr(file, "size", file.size + 1)), "stores refuse it"),
    "name": (first_file(lambda file: setattr(file, "name", "1/other_default.sst")), "is not there"),
    "overlap": (first_file(lambda file: setattr(file, "end_key", b"r\0\0\1")), "overlap"),
}
HARMLESS: dict[str, Callable[[brpb_pb2.BackupMeta], Any]] = {
    "cluster id": lambda meta: meta.ClearField("cluster_id"),
    "cluster version": lambda meta: meta.ClearField("cluster_version"),
    "tool": lambda meta: meta.ClearField("br_version"),
    "ddls": lambda meta: meta.ClearField("ddls"),
    "sha256": first_file(lambda file: file.ClearField("sha256")),
    "iv": first_file(lambda file: file.ClearField("cipher_iv")),
    "start version": lambda meta: setattr(meta, "start_version", 1),
    "end version": lambda meta: setattr(meta, "end_version", 2),
    "order": lambda meta: meta.files.sort(key=lambda file: file.sha256),
    "size": first_file(lambda file: file.ClearField("size")),
}


@pytest.mark.parametrize("flaw", BREAKING)
def test_flaws_that_broke_the_tool_are_demands(golden: Path, flaw: str) -> None:
    """Each flaw that made the running tool fail or lose rows (or would) is found in a golden backup that has it."""
    change, complaint = BREAKING[flaw]
    intact = golden_backup(golden, "v1_to_v2")
    meta = intact.meta
    change(meta)
    assert any(complaint in demand for demand in unmet_demands(intact.with_meta(meta), V2))


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_harmless_differences_are_no_demands(golden: Path, change: Callable[[brpb_pb2.BackupMeta], Any]) -> None:
    """Differences that the running tool ignored are accepted."""
    intact = golden_backup(golden, "v1_to_v2")
    meta = intact.meta
    change(meta)
    assert unmet_demands(intact.with_meta(meta), V2) == []


@pytest.fixture(scope="module")
def sources(clusters: Clusters) -> dict[ApiVersion, LiveCluster]:
    """Return a playground of each API version with rows hard on codecs, some that expire, some gone or replaced."""
    return {version: load(clusters(version), version) for version in ApiVersion}


def load(live: LiveCluster, version: ApiVersion) -> LiveCluster:
    """Load rows and split."""
    raw, data = live.raw(), rows()
    raw.batch_put(dict.fromkeys(list(data)[::3], b"old") | {b"row-gone": b"x"})
    split(live)
    raw.batch_put(data)
    raw.delete(b"row-gone")
    if version.has_ttl:
        raw.batch_put({b"ttl-%03d" % number: b"%d" % number for number in range(50)}, YEAR)
    return live


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return a real S3 server."""
    with versitygw_server(tmp_path_factory.mktemp("versitygw")) as running:
        yield running


CONVERSIONS = [
    ("scan", V1, V1, "v1"),
    ("scan", V1, V1TTL, "v1ttl"),
    ("scan", V1, V2, "v1_to_v2"),
    ("scan", V1TTL, V1TTL, "v1ttl"),
    ("scan", V1TTL, V2, "v1ttl_to_v2"),
    ("scan", V2, V2, "v2"),
    ("store", V1, V1, "v1"),
    ("store", V1, V2, "v1_to_v2"),
    ("store", V1TTL, V1TTL, "v1ttl"),
    ("store", V1TTL, V2, "v1ttl_to_v2"),
    ("store", V2, V2, "v2"),
    ("store", V1, V1TTL, "v1ttl"),
    ("scan", V1TTL, V1, "v1"),
    ("store", V1TTL, V1, "v1"),
    ("scan", V2, V1, "v1"),
    ("store", V2, V1, "v1"),
    ("scan", V2, V1TTL, "v1ttl"),
    ("store", V2, V1TTL, "v1ttl"),
]


def label(value: object) -> str:
    """Return a parameter's id."""
    return value.label if isinstance(value, ApiVersion | Compression) else str(value)


def write(live: LiveCluster, place: StorageLocation, **changes: object) -> None:
    """Back up into several files, on the driver."""
    usual = BackupOptions(live.config, place, executor="driver", file_bytes=64 << 10, allow_loss=frozenset(Loss))
    backup(structs.replace(usual, **changes))


def assert_alike(ours: Directory, theirs: Directory, api_version: ApiVersion) -> None:
    """Demand of a backup of a whole cluster all that the tool demands, and the form of one of the tool's own."""
    assert unmet_demands(ours, api_version) == []
    meta, golden = ours.meta, theirs.meta
    assert len(meta.files) > 1
    assert sum(file.total_kvs for file in meta.files) >= len(rows())
    assert fields(meta) - fields(golden) <= UNHEEDED
    assert fields(golden) - fields(meta) <= UNHEEDED
    assert (meta.is_raw_kv, meta.api_version, meta.version) == (golden.is_raw_kv, golden.api_version, golden.version)
    assert (list(meta.raw_ranges), meta.ddls) == (list(golden.raw_ranges), golden.ddls)
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[\w.]+)?", meta.cluster_version)
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[\w.]+)?", golden.cluster_version)
    assert all(file.name.endswith("_default.sst") for file in [*meta.files, *golden.files])
    assert all((file.size, len(file.sha256)) == (ours.sizes[file.name], 32) for file in meta.files)
    assert ours.sizes.keys() >= {META, *(file.name for file in meta.files)}


@pytest.mark.parametrize(("engine", "source", "target", "model"), CONVERSIONS, ids=label)
def test_each_conversion_of_each_engine(
    engine: str,
    source: ApiVersion,
    target: ApiVersion,
    model: str,
    sources: dict[ApiVersion, LiveCluster],
    golden: Path,
    tmp_path: Path,
) -> None:
    """Meta, file records and rows are as the tool wants them, and formed as in its own backup of the same conversion."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    write(sources[source], place, engine=engine, dst_api_version=target)
    assert_alike(Directory.local(tmp_path / "backup"), golden_backup(golden, model), target)


@pytest.mark.parametrize(
    ("engine", "compression", "model"),
    [
        ("scan", Compression.LZ4, "v1_lz4"),
        ("scan", Compression.SNAPPY, "v1_snappy"),
        ("scan", Compression.NONE, "v1"),
        ("store", Compression.LZ4, "v1_lz4"),
        ("store", Compression.SNAPPY, "v1_snappy"),
    ],
    ids=label,
)
def test_each_compression(
    engine: str,
    compression: Compression,
    model: str,
    sources: dict[ApiVersion, LiveCluster],
    golden: Path,
    tmp_path: Path,
) -> None:
    """Files of every compression meet the demands; RocksDB's tool names the same compression as in the golden files."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    write(sources[V1], place, engine=engine, compression=compression)
    ours, theirs = Directory.local(tmp_path / "backup"), golden_backup(golden, model)
    assert_alike(ours, theirs, V1)
    said = {compression_of(tmp_path / "backup" / file.name) for file in ours.meta.files}
    if compression is Compression.NONE:
        assert said == {"NoCompression"}
    else:
        folder = golden / "backups" / model / "data"
        assert said == {compression_of(folder / file.name) for file in theirs.meta.files}


def compression_of(path: Path) -> str:
    """Return RocksDB's name of an SST's compression."""
    found = re.search(r"SST file compression algo: (\w+)", sst_dump(path, "none", "--show_properties"))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("engine", ["scan", "store"])
def test_on_s3(engine: str, sources: dict[ApiVersion, LiveCluster], server: S3Server, golden: Path) -> None:
    """The same objects are in a bucket, as another S3 client sees them, by whichever engine they came there."""
    write(sources[V2], server.location(f"demands/{engine}"), engine=engine)
    assert_alike(Directory.s3(server.admin, BUCKET, f"demands/{engine}"), golden_backup(golden, "v2"), V2)


@pytest.mark.parametrize("engine", ["scan", "store"])
def test_a_range(engine: str, sources: dict[ApiVersion, LiveCluster], golden: Path, tmp_path: Path) -> None:
    """The tool restores a part of a cluster with the same --start and --end."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    write(sources[V2], place, engine=engine, ranges=(KeyRange(b"row00050", b"row00300"),))
    ours = Directory.local(tmp_path / "backup")
    assert unmet_demands(ours, V2, b"row00050", b"row00300") == []
    assert fields(ours.meta) ^ fields(golden_backup(golden, "v2_ranged").meta) <= UNHEEDED
    assert sum(file.total_kvs for file in ours.meta.files) == 250


@pytest.mark.parametrize("engine", ["scan", "store"])
@pytest.mark.parametrize("method", KEYS)
def test_encrypted(
    engine: str, method: str, sources: dict[ApiVersion, LiveCluster], golden: Path, tmp_path: Path
) -> None:
    """Decrypted as the tool and its stores do it, an encrypted backup is like any other; every file has its own IV."""
    place = StorageLocation("local", str(tmp_path / "backup"), crypter=crypter(method))
    write(sources[V2], place, engine=engine)
    ours = Directory.local(tmp_path / "backup").decrypted(bytes.fromhex(KEYS[method]))
    assert_alike(ours, golden_backup(golden, "v2"), V2)
    assert len({file.cipher_iv for file in ours.meta.files}) == len(ours.meta.files)


def test_parquet_is_refused_aloud(sources: dict[ApiVersion, LiveCluster], tmp_path: Path) -> None:
    """Stores refuse files that are no SSTs: the tool fails, and takes nothing for restored."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    write(sources[V1], place, engine="scan", file_kind=FileKind.PARQUET)
    ours = Directory.local(tmp_path / "backup")
    refused = [demand for demand in unmet_demands(ours, V1) if demand.endswith("is no SST: stores refuse it")]
    assert len(refused) == len(ours.meta.files)
    assert {file.cf for file in ours.meta.files} == {"default"}


def test_several_ranges(sources: dict[ApiVersion, LiveCluster], tmp_path: Path) -> None:
    """The tool restores each of them, and parts of them, with --start and --end; it refuses the gaps."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    write(sources[V2], place, ranges=(KeyRange(b"row00050", b"row00100"), KeyRange(b"row00200", b"row00300")))
    ours = Directory.local(tmp_path / "backup")
    for start, end in ((b"row00050", b"row00100"), (b"row00200", b"row00300")):
        assert unmet_demands(ours, V2, start, end) == []
    assert any("does not cover" in demand for demand in unmet_demands(ours, V2, b"row00050", b"row00300"))


def test_another_keyspace_is_refused_aloud(
    sources: dict[ApiVersion, LiveCluster], golden: Path, tmp_path: Path
) -> None:
    """The tool knows one keyspace; it refuses ours with the stores' own error, and is not misled."""
    sources[V2].raw(sources[V2].create_keyspace("ks4242")).batch_put(rows())
    place = StorageLocation("local", str(tmp_path / "backup"))
    write(sources[V2], place, keyspaces=("ks4242",))
    ours = unmet_demands(Directory.local(tmp_path / "backup"), V2)
    theirs = unmet_demands(golden_backup(golden, "v2_ks4242_rpc"), V2)
    assert ours[0] == theirs[0] == "no raw range: no backup data in the range"
