"""Calls of ``Backup`` and ``ImportSST`` to a playground, as bare as they go over the wire."""

from __future__ import annotations

import uuid
import zlib
from pathlib import Path
from typing import Any

from rocksdict import Options, Rdict

from tests.integration.playground.clients import Client
from tikv_br.cluster.pb import brpb_pb2, brpb_pb2_grpc, import_sstpb_pb2, import_sstpb_pb2_grpc, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground.region import Region

NOOP = brpb_pb2.StorageBackend(noop=brpb_pb2.Noop())


def local(folder: Path) -> brpb_pb2.StorageBackend:
    """A folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    return brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(folder)))


def api_of(client: Client) -> kvrpcpb_pb2.APIVersion.ValueType:
    """The cluster's API version as SSTs and backups name it."""
    return kvrpcpb_pb2.APIVersion.Value(client.playground.settings.version.name)


def backup(client: Client, store_id: int = 0, **fields: Any) -> list[brpb_pb2.BackupResponse]:  # noqa: ANN401
    """Return every response of a raw backup of everything, by default by the store that leads the first region."""
    is_v2 = client.playground.settings.version is ApiVersion.V2
    asked: dict[str, Any] = {
        "start_key": b"r\0\0\0" if is_v2 else b"",
        "end_key": b"r\0\0\1" if is_v2 else b"",
        "storage_backend": NOOP,
        "is_raw_kv": True,
        "dst_api_version": api_of(client),
    }
    store_id = store_id or client.playground.regions.locate(b"").leader_store
    stub = brpb_pb2_grpc.BackupStub(client.channel(client.playground.nodes[store_id].address))
    return list(stub.backup(brpb_pb2.BackupRequest(**{**asked, **fields}), timeout=60))


def files_of(responses: list[brpb_pb2.BackupResponse]) -> list[brpb_pb2.File]:
    """The files of responses without error, by their start keys."""
    assert not any(response.HasField("error") for response in responses), responses
    return sorted((file for response in responses for file in response.files), key=lambda file: file.start_key)


def rows_in(data: bytes, scratch: Path) -> dict[bytes, bytes]:
    """The rows of an SST as RocksDB reads them."""
    path = scratch / f"{uuid.uuid4()}.sst"
    path.write_bytes(data)
    database = Rdict(f"{path}.db", Options(raw_mode=True))
    try:
        database.ingest_external_file([str(path)])
        return {bytes(key): bytes(value) for key, value in database.items()}  # type: ignore[arg-type]
    finally:
        database.close()


def importer(client: Client, store_id: int) -> import_sstpb_pb2_grpc.ImportSSTStub:
    """A store's stub for SSTs."""
    return import_sstpb_pb2_grpc.ImportSSTStub(client.channel(client.playground.nodes[store_id].address))


def meta_for(client: Client, region: Region, **fields: Any) -> import_sstpb_pb2.SSTMeta:  # noqa: ANN401
    """The meta of a new file for a whole region."""
    asked: dict[str, Any] = {
        "uuid": uuid.uuid4().bytes,
        "range": import_sstpb_pb2.Range(start=region.start, end=region.end),
        "cf_name": "default",
        "region_id": region.id,
        "region_epoch": region.to_pb().region_epoch,
        "end_key_exclusive": True,
        "api_version": api_of(client),
    }
    return import_sstpb_pb2.SSTMeta(**{**asked, **fields})


def download(
    client: Client,
    meta: import_sstpb_pb2.SSTMeta,
    store_id: int,
    **fields: Any,  # noqa: ANN401
) -> import_sstpb_pb2.DownloadResponse:
    """One Download."""
    request = import_sstpb_pb2.DownloadRequest(sst=meta, is_raw_kv=True, **fields)
    return importer(client, store_id).Download(request, timeout=60)


def download_everywhere(
    client: Client,
    region: Region,
    meta: import_sstpb_pb2.SSTMeta,
    **fields: Any,  # noqa: ANN401
) -> import_sstpb_pb2.SSTMeta:
    """Download on every replica's store; the meta for the ingest."""
    answers = [download(client, meta, peer.store_id, **fields) for peer in region.peers]
    assert all(answer == answers[0] for answer in answers)
    assert not answers[0].HasField("error"), answers[0]
    meta.range.CopyFrom(answers[0].range)
    return meta


def upload(client: Client, region: Region, meta: import_sstpb_pb2.SSTMeta, data: bytes) -> None:
    """Upload to every replica's store, in chunks."""
    meta.crc32 = zlib.crc32(data)
    chunks = [import_sstpb_pb2.UploadRequest(data=data[at : at + 1000]) for at in range(0, len(data), 1000)]
    for peer in region.peers:
        importer(client, peer.store_id).Upload(iter([import_sstpb_pb2.UploadRequest(meta=meta), *chunks]), timeout=60)


def ingest(
    client: Client, region: Region, *metas: import_sstpb_pb2.SSTMeta, store_id: int = 0
) -> import_sstpb_pb2.IngestResponse:
    """Ingest (MultiIngest, if not one), by default on the leader."""
    stub = importer(client, store_id or region.leader_store)
    context = client.context(region)
    if len(metas) == 1:
        return stub.Ingest(import_sstpb_pb2.IngestRequest(context=context, sst=metas[0]), timeout=60)
    return stub.MultiIngest(import_sstpb_pb2.MultiIngestRequest(context=context, ssts=metas), timeout=60)


def v2_row(user: bytes, value: bytes, ts: int, keyspace: bytes = b"\0\0\0") -> tuple[bytes, bytes]:
    """A V2 row without expiry."""
    return b"z" + codec.encode(b"r" + keyspace + user) + ((1 << 64) - 1 - ts).to_bytes(8, "big"), value + b"\0"
