"""``Backup`` of the playground's stores, beyond what the recordings show."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.playground.clients import Client, running
from tests.integration.playground.ssts import NOOP, backup, files_of, local, meta_for, rows_in, v2_row
from tests.integration.playground.ssts import download as download_sst
from tests.integration.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, moto_server, versitygw_server
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground.node import BACKUP_BOUND, BACKUP_EMPTY_RANGE


@pytest.fixture(params=["moto", "versitygw"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[S3Server]:
    """A look-alike and a real S3 server in turn."""
    running_server = moto_server() if request.param == "moto" else versitygw_server(tmp_path / "versitygw")
    with running_server as started:
        yield started


BUSY = {"region_error": {"server_is_busy": {"reason": "test"}}}


def test_only_the_newest_live_rows_are_written(tmp_path: Path) -> None:
    """V2: overwritten, deleted, expired keys and their older versions are left out; ts and expiry stay as they are."""
    far = int(time.time()) + 1000
    kept = [v2_row(b"a", b"new", 9), (v2_row(b"d", b"", 4)[0], b"lasts" + far.to_bytes(8, "big") + b"\1")]
    gone = [
        v2_row(b"a", b"old", 8),
        (v2_row(b"b", b"", 7)[0], b"\2"),
        v2_row(b"b", b"deleted", 6),
        (v2_row(b"c", b"", 5)[0], b"over" + (1).to_bytes(8, "big") + b"\1"),
        v2_row(b"c", b"hidden by the expired", 3),
    ]
    with running(tmp_path / "cluster", ApiVersion.V2) as client:
        client.playground.engine.write(kept + gone)
        [file] = files_of(backup(client, storage_backend=local(tmp_path / "backup")))
    assert rows_in((tmp_path / "backup" / file.name).read_bytes(), tmp_path) == dict(kept)
    assert (file.total_kvs, file.total_bytes) == (2, len(b"r\0\0\0anew" + b"r\0\0\0dlasts"))


def test_expired_rows_of_v1ttl_are_left_out(tmp_path: Path) -> None:
    """Converted to V2, a row without expiry loses its eight zero bytes and one with expiry keeps it."""
    far = int(time.time()) + 1000
    rows = [(b"za", b"1" + bytes(8)), (b"zb", b"2" + (5).to_bytes(8, "big")), (b"zc", b"3" + far.to_bytes(8, "big"))]
    with running(tmp_path / "cluster", ApiVersion.V1TTL) as client:
        client.playground.engine.write(rows)
        storage = local(tmp_path / "backup")
        [file] = files_of(backup(client, storage_backend=storage, dst_api_version=kv.V2))
    expected = [v2_row(b"a", b"1", 1), (v2_row(b"c", b"", 1)[0], b"3" + far.to_bytes(8, "big") + b"\1")]
    assert rows_in((tmp_path / "backup" / file.name).read_bytes(), tmp_path) == dict(expected)


def is_behind(client: Client, ts: int) -> bool:
    """Whether the next write's timestamp is below that one of PD's."""
    return client.playground.nodes[client.region(b"k").leader_store].causal.next_ts() < ts


def test_the_flush_comes_before_the_storage(tmp_path: Path) -> None:
    """A backup to a folder that is not there still flushes timestamps; one refused for its version does not."""
    with running(tmp_path, ApiVersion.V2, ts_ahead=600.0) as client:
        before = client.playground.tso.next()
        assert is_behind(client, before)
        [refused] = backup(client, dst_api_version=kv.V1)
        assert "invalid backup version, cur: V2, dst: V1" in refused.error.msg
        assert is_behind(client, before)
        missing = brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(tmp_path / "nosuch")))
        [failed] = backup(client, storage_backend=missing)
        assert "No such file or directory" in failed.error.msg
        assert not is_behind(client, before)


@pytest.mark.parametrize(
    ("api_version", "fields", "what"),
    [
        (ApiVersion.V1, {"start_key": b"k", "end_key": b"k"}, BACKUP_EMPTY_RANGE),
        (ApiVersion.V2, {"start_key": b"r\0\0\0k", "end_key": b"r\0\0\0k"}, BACKUP_EMPTY_RANGE),
        (ApiVersion.V1, {"sub_ranges": [kv.KeyRange(start_key=b"k", end_key=b"k")]}, BACKUP_EMPTY_RANGE),
        (ApiVersion.V1, {"is_raw_kv": False}, BACKUP_BOUND),
        (ApiVersion.V1TTL, {"is_raw_kv": False, "start_key": b"a"}, BACKUP_BOUND),
    ],
)
def test_deadly_requests(tmp_path: Path, api_version: ApiVersion, fields: dict[str, Any], what: str) -> None:
    """The caller sees the store die, the fatal_request is on record, and the playground lives on."""
    with running(tmp_path, api_version) as client:
        client.put(b"k", b"v")
        client.admin.split(b"raw-5")
        with pytest.raises(grpc.RpcError) as death:
            backup(client, **fields)
        assert death.value.code() is grpc.StatusCode.UNAVAILABLE
        [fatal_request] = client.admin.fatal_requests()
        assert fatal_request["what"].startswith(what)
        assert fatal_request["rpc"] == "Backup"
        client.admin.pardon()
        assert len(files_of(backup(client))) == 1
        client.admin.assert_innocent()


def test_not_raw_is_harmless_without_data(tmp_path: Path) -> None:
    """A V1 store that holds nothing survives a request that is not raw."""
    with running(tmp_path) as client:
        assert files_of(backup(client, is_raw_kv=False)) == []
        client.admin.assert_innocent()


def test_one_region_fails_and_the_others_go_on(tmp_path: Path) -> None:
    """A region error is an event of its own, without range; all other regions are there."""
    with running(tmp_path) as client:
        admin = client.admin
        admin.split(b"c", b"e")
        for key in (b"b", b"d", b"f"):
            client.put(key, b"v")
        struck = client.region(b"d")
        with admin.failing("backup.region", BUSY, region_id=struck.id):
            responses = backup(client)
        [failed] = [response for response in responses if response.HasField("error")]
        assert failed.error.region_error.server_is_busy.reason == "test"
        assert (failed.start_key, failed.end_key) == (b"", b"")
        files = files_of([response for response in responses if response is not failed])
        assert [(file.start_key, file.total_kvs) for file in files] == [(b"", 1), (b"e", 1)]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ({"name": "split", "arguments": {"keys": [b"m".hex()]}}, "epoch_not_match"),
        ({"name": "transfer-leader"}, "not_leader"),
        ({"name": "merge"}, "region_not_found"),
    ],
)
def test_regions_that_change_meanwhile(tmp_path: Path, command: dict[str, object], kind: str) -> None:
    """After a split, move or merge the answer is the error that fits, not other data."""
    with running(tmp_path, keyspace_split_delay=60.0) as client:
        admin = client.admin
        admin.split(b"c")
        first, second = client.region(b"a"), client.region(b"d")
        client.put(b"d", b"v")
        others = [peer.store_id for peer in second.peers if peer.store_id != second.leader_store]
        arguments = {
            "transfer-leader": {"region_id": second.id, "store_id": others[0]},
            "merge": {"source": second.id, "target": first.id},
        }
        command = {"arguments": arguments.get(str(command["name"])), **command}
        with admin.failing("backup.region", {"command": command}, region_id=first.id):
            responses = backup(client)
        failed = [response for response in responses if response.HasField("error")]
        assert failed[-1].error.region_error.HasField(kind)  # type: ignore[arg-type]
        assert not any(response.files for response in responses)


def test_sub_ranges_replace_the_range(tmp_path: Path) -> None:
    """Work is done for the sub-ranges only, each clipped to its regions."""
    with running(tmp_path) as client:
        for key in (b"a", b"b", b"c", b"d"):
            client.put(key, b"v")
        ranges = [kv.KeyRange(start_key=b"a", end_key=b"b"), kv.KeyRange(start_key=b"c", end_key=b"d")]
        responses = backup(client, sub_ranges=ranges)
        assert [(response.start_key, response.end_key) for response in responses] == [(b"a", b"b"), (b"c", b"d")]
        assert [file.total_kvs for file in files_of(responses)] == [1, 1]


def test_a_failing_storage_leaves_the_range(tmp_path: Path) -> None:
    """When a file cannot be saved the event names the range that is not done, and no file."""
    storage = local(tmp_path / "backup")
    with running(tmp_path / "cluster") as client:
        client.put(b"k", b"v")
        store_id = client.region(b"k").leader_store
        (tmp_path / "backup" / str(store_id)).write_text("in the way of the folder")
        failed = [each for each in backup(client, storage_backend=storage) if each.HasField("error")]
        assert [(each.start_key, list(each.files)) for each in failed] == [(b"", [])]
        assert "Io(Os { code: 17, kind: AlreadyExists" in failed[0].error.msg
        assert failed[0].end_key == codec.encode(b"r\0\0\0")


def test_files_in_s3(tmp_path: Path, server: S3Server) -> None:
    """With the credentials of the request a store writes to a bucket and reads from it; wrong ones are denied."""
    place = brpb_pb2.S3(
        endpoint=server.endpoint, region="us-east-1", bucket=BUCKET, prefix=tmp_path.name, access_key=ACCESS_KEY,
        secret_access_key=SECRET_KEY, force_path_style=True,
    )  # fmt: skip
    with running(tmp_path / "cluster") as client:
        client.put(b"k", b"v")
        storage = brpb_pb2.StorageBackend(s3=place)
        [file] = files_of(backup(client, storage_backend=storage))
        stored = server.admin.get_object(Bucket=BUCKET, Key=f"{tmp_path.name}/{file.name}")["Body"].read()
        assert hashlib.sha256(stored).digest() == file.sha256
        region = client.region(b"k")
        meta = meta_for(client, region, length=file.size)
        assert (
            download_sst(client, meta, region.leader_store, name=file.name, storage_backend=storage).range.end == b"k"
        )
        meta = meta_for(client, region)
        answer = download_sst(client, meta, region.leader_store, name="1/nosuch.sst", storage_backend=storage)
        assert answer.error.message.startswith(f"Cannot read s3://{BUCKET}/{tmp_path.name}/1/nosuch.sst into ")
        place.bucket = "nosuch"
        [failed] = [
            each
            for each in backup(client, storage_backend=brpb_pb2.StorageBackend(s3=place))
            if each.files or each.error.msg
        ]
        assert "failed to put object" in failed.error.msg
        assert failed.end_key


def test_noop_writes_nothing(tmp_path: Path) -> None:
    """The noop storage gives files with flat names and sums, and none of them is anywhere."""
    with running(tmp_path) as client:
        client.put(b"k", b"v")
        [file] = files_of(backup(client, storage_backend=NOOP))
        assert "/" not in file.name
        assert file.total_kvs == 1
        assert not list(tmp_path.rglob("*default.sst"))
