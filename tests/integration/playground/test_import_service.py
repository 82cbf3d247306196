"""``ImportSST`` of the playground's stores, beyond what the recordings show."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc
import pytest

from tests.integration.playground.clients import Client, running
from tests.integration.playground.ssts import (
    backup,
    download,
    download_everywhere,
    importer,
    ingest,
    local,
    meta_for,
    upload,
    v2_row,
)
from tests.support.sst_surgery import exchange_keys, flip, without_properties, write_sst
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.node import DOWNLOAD_UNKNOWN_CF, DOWNLOAD_WITHOUT_Z, INGEST_DEADLY_SST, INGEST_WITHOUT_PEER_FILE
from tikv_br.playground.region import Region

ROWS = [(b"zk%03d" % number, b"value %d" % number) for number in range(100)]
OK = import_sstpb_pb2.IngestResponse()


def place(tmp_path: Path, rows: Iterable[tuple[bytes, bytes]], name: str = "x.sst") -> dict[str, object]:
    """Write an SST into a backup's folder; what a Download of it asks for."""
    storage = local(tmp_path / "backup")
    write_sst(tmp_path / "backup" / name, rows)
    return {"name": name, "storage_backend": storage}


def scan(client: Client, region: Region, start: bytes = b"", end: bytes = b"\xff") -> dict[bytes, bytes]:
    """RawScan of a region's user keys."""
    request = kv.RawScanRequest(start_key=client.key(start), end_key=client.key(end), limit=1000)
    answer = client.call("RawScan", b"k", request, region=region)
    return {pair.key: pair.value for pair in answer.kvs}


def test_uploads_that_are_refused(tmp_path: Path) -> None:
    """Wrong crc32, no meta first, an empty chunk, a file that is there already: each ends the stream."""
    request = import_sstpb_pb2.UploadRequest
    with running(tmp_path, stores=1) as client:
        region = client.region(b"k")
        stub = importer(client, region.leader_store)

        def refused(*chunks: import_sstpb_pb2.UploadRequest) -> str:
            with pytest.raises(grpc.RpcError) as error:
                stub.Upload(iter(chunks), timeout=60)
            assert error.value.code() is grpc.StatusCode.UNKNOWN
            return str(error.value.details())

        sound = meta_for(client, region, crc32=zlib.crc32(b"data"))
        assert "FileCorrupted" in refused(request(meta=meta_for(client, region, crc32=1)), request(data=b"data"))
        assert "InvalidChunk" in refused(request(data=b"data"))
        assert "InvalidChunk" in refused(request(meta=sound), request(data=b""))
        assert "InvalidChunk" in refused()
        stub.Upload(iter([request(meta=sound), request(data=b"data")]), timeout=60)
        assert "FileExists" in refused(request(meta=sound), request(data=b"data"))
        assert "expected 16, found 2" in refused(request(meta=meta_for(client, region, uuid=b"xx")))


DEADLY: dict[str, Callable[[bytes], bytes]] = {
    "flipped byte": lambda data: flip(data, 30),
    "no global_seqno": lambda data: without_properties(data, "rocksdb.external_sst_file.global_seqno"),
    "no num.entries": lambda data: without_properties(data, "rocksdb.num.entries"),
    "unsorted": lambda data: exchange_keys(data, b"zk010", b"zk020"),
    "not an sst": lambda _: b"junk" * 100,
}


@pytest.mark.parametrize("damage", DEADLY)
def test_uploads_that_kill_at_the_ingest(tmp_path: Path, damage: str) -> None:
    """An upload takes any bytes; a store that ingests these dies, nothing is ingested, the fatal_request is on record."""
    data = DEADLY[damage](write_sst(tmp_path / "x.sst", ROWS))
    with running(tmp_path) as client:
        region = client.region(b"k")
        meta = meta_for(client, region, range=import_sstpb_pb2.Range(start=b"k000", end=b"k099"))
        upload(client, region, meta, data)
        with pytest.raises(grpc.RpcError) as death:
            ingest(client, region, meta)
        assert death.value.code() is grpc.StatusCode.UNAVAILABLE
        [fatal_request] = client.admin.fatal_requests()
        assert fatal_request["what"].startswith(INGEST_DEADLY_SST)
        assert fatal_request["store_id"] == region.leader_store
        assert scan(client, region) == {}


def test_downloads_that_kill_at_once(tmp_path: Path) -> None:
    """Keys without z and an unknown column family kill the store at the download."""
    with running(tmp_path / "cluster") as client:
        region = client.region(b"k")
        asked = {"store_id": region.leader_store, **place(tmp_path, [(b"k", b"v")])}
        for meta in (meta_for(client, region), meta_for(client, region, cf_name="nosuch")):
            with pytest.raises(grpc.RpcError) as death:
                download(client, meta, **asked)  # type: ignore[arg-type]
            assert death.value.code() is grpc.StatusCode.UNAVAILABLE
        whats = [fatal_request["what"].partition(":")[0] for fatal_request in client.admin.fatal_requests()]
        assert whats == [DOWNLOAD_WITHOUT_Z, DOWNLOAD_UNKNOWN_CF]


def test_a_follower_needs_the_file_too(tmp_path: Path) -> None:
    """The leader ingests what it has; each follower that lacks the file will die of it, which is on record."""
    with running(tmp_path / "cluster") as client:
        region = client.region(b"k")
        meta = meta_for(client, region)
        meta.range.CopyFrom(download(client, meta, region.leader_store, **place(tmp_path, ROWS)).range)
        assert ingest(client, region, meta) == OK
        followers = {peer.store_id for peer in region.peers} - {region.leader_store}
        found = client.admin.fatal_requests()
        assert {fatal_request["store_id"] for fatal_request in found} == followers
        assert all(fatal_request["what"].startswith(INGEST_WITHOUT_PEER_FILE) for fatal_request in found)


def test_the_epoch_is_compared_to_the_conf_ver(tmp_path: Path) -> None:
    """A replica that moved after the download makes the file stale, though reads at that version go on."""
    with running(tmp_path / "cluster", stores=4) as client:
        region = client.region(b"k")
        meta = download_everywhere(client, region, meta_for(client, region), **place(tmp_path, ROWS))
        follower = next(peer for peer in region.peers if peer.store_id != region.leader_store)
        free = next(store for store in client.playground.nodes if region.peer_on(store) is None)
        moved = client.playground.regions.move(region.id, follower.store_id, free)
        answer = ingest(client, region, meta)
        assert answer.error.HasField("epoch_not_match")
        [current] = answer.error.epoch_not_match.current_regions
        assert current == moved.to_pb()
        assert scan(client, region) == {}
        fresh = download_everywhere(client, moved, meta_for(client, moved), **place(tmp_path, ROWS))
        assert ingest(client, moved, fresh) == OK
        client.admin.assert_innocent()


def test_a_split_makes_files_stale(tmp_path: Path) -> None:
    """After a split the context is refused; with a new context the old file's epoch is."""
    with running(tmp_path / "cluster") as client:
        region = client.region(b"k")
        meta = download_everywhere(client, region, meta_for(client, region), **place(tmp_path, ROWS))
        client.playground.regions.split(region.id, [b"k050"])
        assert len(ingest(client, region, meta).error.epoch_not_match.current_regions) == 2
        assert ingest(client, client.region(b"k09"), meta).error.HasField("epoch_not_match")


def test_several_files_at_once(tmp_path: Path) -> None:
    """MultiIngest takes all files, or none when one is missing or named twice."""
    with running(tmp_path / "cluster") as client:
        region = client.region(b"k")
        one, other = (
            download_everywhere(
                client, region, meta_for(client, region), **place(tmp_path, ROWS[part], f"{part.start}.sst")
            )
            for part in (slice(0, 50), slice(50, 100))
        )
        missing = meta_for(client, region)
        assert ingest(client, region, one, missing).error.HasField("stale_command")
        assert ingest(client, region, one, one).error.message == "ingest file conflict"
        assert scan(client, region) == {}
        assert ingest(client, region, one, other) == OK
        assert len(scan(client, region)) == 100
        assert ingest(client, region, one, other).error.HasField("stale_command")


def test_the_same_file_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an ingest of a file is under way a second one is refused as a conflict."""
    with running(tmp_path / "cluster") as client:
        region = client.region(b"k")
        meta = download_everywhere(client, region, meta_for(client, region), **place(tmp_path, ROWS))
        under_way, go_on = threading.Event(), threading.Event()
        really = client.playground.engine.ingest

        def slowly(paths: Iterable[Path | str], family: str) -> None:
            under_way.set()
            assert go_on.wait(60)
            really(paths)

        monkeypatch.setattr(client.playground.engine, "ingest", slowly)
        answers: list[import_sstpb_pb2.IngestResponse] = []
        first = threading.Thread(target=lambda: answers.append(ingest(client, region, meta)))
        first.start()
        assert under_way.wait(60)
        assert ingest(client, region, meta).error.message == "ingest file conflict"
        go_on.set()
        first.join()
        assert answers == [OK]


def test_a_file_waits_through_a_restart(tmp_path: Path) -> None:
    """The downloaded file is on the store's disk: after kill and restart it can be ingested."""
    with running(tmp_path / "cluster") as client:
        region = client.region(b"k")
        meta = download_everywhere(client, region, meta_for(client, region), **place(tmp_path, ROWS))
        client.admin.run("kill-store", store_id=region.leader_store)
        client.admin.run("restart-store", store_id=region.leader_store)
        context = importer(client, region.leader_store)
        request = import_sstpb_pb2.IngestRequest(context=client.context(region), sst=meta)
        assert context.Ingest(request, timeout=60, wait_for_ready=True) == OK
        assert len(scan(client, region)) == 100


def test_rows_above_the_stores_timestamps_shadow_writes(tmp_path: Path) -> None:
    """A row stamped with a fresh TSO hides the next put, which gets an older cached ts; after a flush puts show."""
    with running(tmp_path / "cluster", ApiVersion.V2, ts_ahead=600.0) as client:
        time.sleep(0.2)
        region = client.region(b"k")
        ts = client.playground.tso.next()
        asked = place(tmp_path, [v2_row(b"k", b"restored", ts)])
        assert ingest(client, region, download_everywhere(client, region, meta_for(client, region), **asked)) == OK
        client.put(b"k", b"shadowed")
        assert client.get(b"k") == b"restored"
        for store_id in client.playground.nodes:
            backup(client, store_id, start_key=b"r\0\0\0k", end_key=b"r\0\0\0k\0")
        client.put(b"k", b"seen")
        assert client.get(b"k") == b"seen"


def test_import_mode(tmp_path: Path) -> None:
    """Entered and left by SwitchMode, store by store; over when its time runs out and after a restart."""
    request = import_sstpb_pb2.SwitchModeRequest
    with running(tmp_path) as client:
        admin = client.admin
        one, other, *_ = client.playground.nodes

        def importing() -> list[int]:
            return [store["store_id"] for store in admin.get("stores") if store["import_mode"]]

        for store_id in (one, other):
            importer(client, store_id).SwitchMode(request(mode=import_sstpb_pb2.Import), timeout=60)
        assert importing() == [one, other]
        importer(client, one).SwitchMode(request(mode=import_sstpb_pb2.Normal), timeout=60)
        assert importing() == [other]
        admin.run("expire-import-mode", store_id=other)
        assert importing() == []
        importer(client, one).SwitchMode(request(mode=import_sstpb_pb2.Import), timeout=60)
        admin.run("kill-store", store_id=one)
        admin.run("restart-store", store_id=one)
        assert importing() == []
