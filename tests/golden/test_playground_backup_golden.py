"""The playground's stores write the data of recorded backups as real stores did, row by row."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.integration.backup.reading import rocksdb_rows
from tests.integration.playground.clients import Client, running
from tests.support.playground_admin import PlaygroundAdmin
from tikv_br.cluster.pb import brpb_pb2, brpb_pb2_grpc, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion

CASES = [
    ("v1", "v1", ApiVersion.V1),
    ("v1", "v1_lz4", ApiVersion.V1),
    ("v1", "v1_snappy", ApiVersion.V1),
    ("v1", "v1_to_v2", ApiVersion.V1),
    ("v1ttl", "v1ttl", ApiVersion.V1TTL),
    ("v1ttl", "v1ttl_to_v2", ApiVersion.V1TTL),
    ("v2", "v2", ApiVersion.V2),
    ("v2", "v2_ranged", ApiVersion.V2),
    ("v2_ks1_rpc", "v2_ks1_rpc", ApiVersion.V2),
    ("v2_3stores", "v2_3stores", ApiVersion.V2),
]
COMPRESSION = {"v1_lz4": brpb_pb2.LZ4, "v1_snappy": brpb_pb2.SNAPPY, "v2_ranged": brpb_pb2.LZ4}


@pytest.mark.parametrize(("data", "backup", "api_version"), CASES)
def test_backup_equals_the_recorded(
    golden: Path, tmp_path: Path, data: str, backup: str, api_version: ApiVersion
) -> None:
    """The same rows in regions of the same bounds give files of the same ranges, sums and internal rows."""
    folder = golden / "backups" / backup
    recorded = brpb_pb2.BackupMeta.FromString((folder / "data" / "backupmeta").read_bytes())
    meta = json.loads((folder / "meta.json").read_text())
    written = tmp_path / "backup"
    written.mkdir()
    with running(tmp_path / "cluster", api_version, stores=3, keyspace_split_delay=60.0) as client:
        admin = PlaygroundAdmin(client.playground.state.address)
        client.playground.engine.ingest((golden / "backups" / data / "data").rglob("*.sst"))
        bounds = [bytes.fromhex(region["start_key"]) for region in meta["before"]["regions"]]
        admin.split(*filter(None, bounds))
        admin.run("scatter")
        files = backed_up(client, written, meta, backup)
    assert [described(file) for file in files] == sorted({described(file) for file in recorded.files})
    assert rocksdb_rows(written, tmp_path) == rocksdb_rows(folder / "data", tmp_path)
    for file in files:
        assert hashlib.sha256((written / file.name).read_bytes()).digest() == file.sha256


def backed_up(client: Client, folder: Path, meta: dict[str, object], name: str) -> list[brpb_pb2.File]:
    """All files of a Backup sent to every store, by their start keys."""
    asked: dict[str, str] = meta["range"]  # type: ignore[assignment]
    request = brpb_pb2.BackupRequest(
        start_key=bytes.fromhex(asked["rpc_start"]),
        end_key=bytes.fromhex(asked["rpc_end"]),
        storage_backend=brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(folder))),
        is_raw_kv=True,
        compression_type=COMPRESSION.get(name, brpb_pb2.ZSTD),
        dst_api_version=kvrpcpb_pb2.APIVersion.Value(str(meta["dst_api"]).upper()),
    )
    files: list[brpb_pb2.File] = []
    for node in client.playground.nodes.values():
        stub = brpb_pb2_grpc.BackupStub(client.channel(node.address))
        for response in stub.backup(request, timeout=60):
            assert not response.HasField("error"), response
            assert response.api_version == request.dst_api_version
            files += response.files
    return sorted(files, key=lambda file: file.start_key)


def described(file: brpb_pb2.File) -> tuple[object, ...]:
    """Properties of a file that do not depend on place and time."""
    return (
        file.start_key,
        file.end_key,
        file.total_kvs,
        file.total_bytes,
        file.crc64xor,
        file.cf,
        file.start_version,
        file.end_version,
    )
