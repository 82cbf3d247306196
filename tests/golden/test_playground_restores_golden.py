"""Backups that real stores wrote go into the playground by bare RPCs, and every row comes out of it again.

None of our restore code, nor our reading of SSTs, has a part in it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zstandard

from tests.integration.playground.clients import Client, running
from tests.support.tools import GOLDEN_BACKUPS
from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2, import_sstpb_pb2_grpc
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground.region import Region

Json: TypeAlias = Any
CORE = {"v1", "v1ttl_to_v2"}
"""Backups that scripts/test.sh restores by default: each starts a cluster."""
EXPECTED_OF = {"v1_lz4": "v1", "v1_snappy": "v1"}
PAGE = 500
TTL_TOLERANCE = 60


@pytest.mark.parametrize(
    "name", [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in GOLDEN_BACKUPS]
)
def test_restored_rows_equal_the_recorded(golden: Path, tmp_path: Path, name: str) -> None:
    """RawScan, RawChecksum, RawGetKeyTTL and the stored timestamps equal what was recorded beside the backup."""
    folder = golden / "backups" / name
    meta = brpb_pb2.BackupMeta.FromString((folder / "data" / "backupmeta").read_bytes())
    expected = expected_rows(golden / "backups" / EXPECTED_OF.get(name, name))
    sums = json.loads((folder / "meta.json").read_text())["expected_sums"]
    api_version = ApiVersion(meta.api_version)
    with running(tmp_path, api_version, stores=3) as client:
        split_within_files(client, expected)
        for file in meta.files:
            restore(client, file, folder / "data", api_version)
        assert {row.key: row.value for row in scan(client)} == {row["k"]: row["v"] for row in expected}
        assert checksum(client) == (sums["crc64xor"], sums["total_kvs"], sums["total_bytes"])
        if api_version.has_ttl:
            check_ttls(client, expected)
        if api_version is ApiVersion.V2:
            stored = {key for key, _ in client.playground.engine.iterate(b"z", b"")}
            stamps = {row["k"]: (1 << 64) - 1 - row["ts"] for row in expected}
            assert stored == {b"z" + codec.encode(key) + stamp.to_bytes(8, "big") for key, stamp in stamps.items()}
        assert client.playground.fatal_requests.all() == []


def expected_rows(folder: Path) -> list[Json]:
    """Recorded rows with keys and values as bytes."""
    with (folder / "expected.jsonl.zst").open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file).read().decode()
    rows = [json.loads(line) for line in text.splitlines()]
    return [{**row, "k": bytes.fromhex(row["k"]), "v": bytes.fromhex(row["v"])} for row in rows]


def split_within_files(client: Client, expected: list[Json]) -> None:
    """Region bounds where the backup had none, so that files are cut."""
    is_v2 = client.playground.settings.version is ApiVersion.V2
    for row in expected[len(expected) // 14 :: len(expected) // 7]:
        bound = codec.encode(row["k"]) if is_v2 else row["k"]
        client.playground.regions.split(client.playground.regions.locate(bound).id, [bound])


def restore(client: Client, file: brpb_pb2.File, folder: Path, api_version: ApiVersion) -> None:
    """Download to every replica of every region that the file meets, then ingest on the leader."""
    is_v2 = api_version is ApiVersion.V2
    start, end = (codec.encode(key) if is_v2 and key else key for key in (file.start_key, file.end_key))
    backend = brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(folder)))
    for region in client.playground.regions.overlapping(start, end):
        meta = import_sstpb_pb2.SSTMeta(
            uuid=uuid.uuid4().bytes,
            range=import_sstpb_pb2.Range(
                start=max(start, region.start), end=min(filter(None, (end, region.end)), default=b"")
            ),
            length=file.size,
            cf_name=file.cf,
            region_id=region.id,
            region_epoch=region.to_pb().region_epoch,
            end_key_exclusive=True,
            api_version=kv.APIVersion.Value(api_version.name),
            cipher_iv=file.cipher_iv,
        )
        request = import_sstpb_pb2.DownloadRequest(sst=meta, name=file.name, storage_backend=backend, is_raw_kv=True)
        answers = [import_stub(client, peer.store_id).Download(request, timeout=60) for peer in region.peers]
        assert all(answer == answers[0] and not answer.HasField("error") for answer in answers), answers
        if not answers[0].is_empty:
            meta.range.CopyFrom(answers[0].range)
            ingest = import_sstpb_pb2.IngestRequest(context=client.context(region), sst=meta)
            answer = import_stub(client, region.leader_store).Ingest(ingest, timeout=60)
            assert answer == import_sstpb_pb2.IngestResponse()


def import_stub(client: Client, store_id: int) -> import_sstpb_pb2_grpc.ImportSSTStub:
    """A store's stub for SSTs."""
    return import_sstpb_pb2_grpc.ImportSSTStub(client.channel(client.playground.nodes[store_id].address))


def rpc_ranges(client: Client) -> Iterator[tuple[Region, bytes, bytes]]:
    """Every region with its part of all raw data, as RPC keys."""
    is_v2 = client.playground.settings.version is ApiVersion.V2
    for region in client.playground.regions.all():
        if not is_v2:
            yield region, region.start, region.end
            continue
        start, end = (codec.decode(bound)[0] if bound else b"" for bound in (region.start, region.end))
        start, end = max(start, b"r"), min(end or b"s", b"s")
        if start < end:
            yield region, start, end


def scan(client: Client) -> Iterator[kv.KvPair]:
    """All pairs, by RawScan page by page, region by region."""
    for region, start, end in rpc_ranges(client):
        request = kv.RawScanRequest(context=client.context(region), start_key=start, end_key=end, limit=PAGE)
        while True:
            answer = client.store(region.leader_store).RawScan(request, timeout=60)
            assert not answer.HasField("region_error"), answer
            yield from answer.kvs
            if len(answer.kvs) < PAGE:
                break
            request.start_key = answer.kvs[-1].key + b"\0"


def checksum(client: Client) -> tuple[int, int, int]:
    """RawChecksum over everything: crc64xor, pairs, bytes."""
    crc64xor = total_kvs = total_bytes = 0
    for region, start, end in rpc_ranges(client):
        key_range = kv.KeyRange(start_key=start, end_key=end)
        request = kv.RawChecksumRequest(context=client.context(region), ranges=[key_range])
        answer = client.store(region.leader_store).RawChecksum(request, timeout=60)
        assert not answer.error
        assert not answer.HasField("region_error")
        crc64xor ^= answer.checksum
        total_kvs += answer.total_kvs
        total_bytes += answer.total_bytes
    return crc64xor, total_kvs, total_bytes


def check_ttls(client: Client, expected: list[Json]) -> None:
    """RawGetKeyTTL of every row is the time left until its recorded expiry, or 0."""
    is_v2 = client.playground.settings.version is ApiVersion.V2
    for row in expected:
        region = client.playground.regions.locate(codec.encode(row["k"]) if is_v2 else row["k"])
        request = kv.RawGetKeyTTLRequest(context=client.context(region), key=row["k"])
        answer = client.store(region.leader_store).RawGetKeyTTL(request, timeout=60)
        assert not answer.not_found
        left = row["e"] - time.time() if row["e"] else 0
        assert abs(answer.ttl - left) < TTL_TOLERANCE
