"""Classification of a store's download errors, whatever the names of file and location."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest

from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Peer, Region
from tikv_br.compare.files import FilePart
from tikv_br.errors import (
    BackupDamaged,
    ClusterUnreachable,
    StorageDenied,
    StorageObjectMissing,
    StorageUnreachable,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode, encode
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite
from tikv_br.restore.ingest import Download

FILE = "sst/0000_default.sst"
TEMP = "/data/404 Not Found/import/.temp/1.sst"


def meaning(message: str, backend: brpb_pb2.StorageBackend, name: str = FILE) -> Exception:
    """Class of a download error with that message."""
    download = cast("Any", object.__new__(Download))
    download._request = import_sstpb_pb2.DownloadRequest(storage_backend=backend)
    store = cast("Any", SimpleNamespace(store=SimpleNamespace(id=4)))
    found = download._classify_error(store, name, import_sstpb_pb2.Error(message=message))
    assert isinstance(found, Exception)
    return found


def s3(bucket: str = "bucket", prefix: str = "prefix") -> brpb_pb2.StorageBackend:
    """A backend on S3."""
    place = brpb_pb2.S3(bucket=bucket, prefix=prefix, endpoint="http://minio-404.example:9000")
    return brpb_pb2.StorageBackend(s3=place)


def unread(cause: str, backend: brpb_pb2.StorageBackend, name: str = FILE) -> str:
    """TiKV's message for a file that cannot be read."""
    base = f"s3://{backend.s3.bucket}/{backend.s3.prefix}"
    return f"Cannot read {base}/{name} into {TEMP}: {cause}"


def failed_request(backend: brpb_pb2.StorageBackend, name: str, outcome: str) -> str:
    """Error of a store's storage client for a request."""
    key = f"{backend.s3.prefix}/{name}"
    url = f"{backend.s3.endpoint}/{backend.s3.bucket}/{quote(key)}"
    return f"failed to get object Object at location {key} not found: Error performing GET {url} in 4ms - {outcome}"


NAMES = ("404", "year/404 Not Found/a", "NoSuchKey", "NotFound", "Forbidden", "AccessDenied", "Corruption")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_does_not_make_a_passing_error_fatal(name: str) -> None:
    """A connection that breaks may be there a moment later."""
    for backend, file in ((s3(bucket=name), FILE), (s3(prefix=name), FILE), (s3(), f"sst/{name}.sst"), (s3(), name)):
        cause = failed_request(backend, file, "HTTP error: connection reset")
        assert isinstance(meaning(unread(cause, backend, file), backend, file), StorageUnreachable), file


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        ("Server returned non-2xx status code: 404 Not Found: <?xml", StorageObjectMissing),
        ("<Error><Code>NoSuchKey</Code>", StorageObjectMissing),
        ("Server returned non-2xx status code: 403 Forbidden: <?xml", StorageDenied),
        ("<Error><Code>AccessDenied</Code>", StorageDenied),
        ("<Error><Code>BlobNotFound</Code>", StorageObjectMissing),
        ("<Error><Code>ContainerNotFound</Code>", StorageObjectMissing),
        ("<Error><Code>AuthenticationFailed</Code>", StorageDenied),
        ("<Error><Code>AuthorizationPermissionMismatch</Code>", StorageDenied),
        ("downloaded size 3, expected 4", BackupDamaged),
        ("Server returned non-2xx status code: 503 Service Unavailable", StorageUnreachable),
        ("No space left on device (os error 28)", RegionErrorSeen),
    ],
)
def test_the_storage_error_decides(outcome: str, kind: type[Exception]) -> None:
    """Only the storage's own text counts, whatever the names."""
    for backend in (s3(), s3(bucket="backups-404"), s3(prefix="of/Forbidden")):
        assert type(meaning(unread(failed_request(backend, FILE, outcome), backend), backend)) is kind


def test_other_words() -> None:
    """A damaged table, a region that has moved, and what is not known."""
    place = s3()
    assert isinstance(meaning('Engine Engine(Status { state: "Corruption: block" })', place), BackupDamaged)
    assert isinstance(meaning("region 4 not found, maybe it's not a replica of this store", place), RegionErrorSeen)
    assert type(meaning("something else", place)) is ClusterUnreachable


PART = FileEntry("a_write.sst", 7, b"x\0\0\1a", b"x\0\0\1b", 0, 0, 0, cf="write")
HERE = Region(id=3, start=b"", end=b"", conf_ver=1, version=2, peers=(), leader=Peer(0, 0))


def asked(mode: KeyMode, source: ApiVersion, target: KeyCodec, rewrite: Rewrite, ts: int) -> tuple[Any, Any]:
    """The request for a file, and the meta of a region, as they are sent."""
    job = cast("Any", SimpleNamespace(codec=target, api_version=source, backend=b"", cipher_info=b"", new_timestamp=ts))
    job.slow_seconds = 0.0
    download = Download(cast("Any", None), job, FilePart(PART, PART.key_range, rewrite))
    assert download._request.is_raw_kv == (mode is KeyMode.RAW)
    return download._request, download._meta(HERE, PART, rewrite.range(PART.key_range))


def test_requests_for_rows_of_transactions_in_place() -> None:
    """Ranges are encoded, and a new timestamp needs no prefix."""
    codec = KeyCodec(ApiVersion.V2, 1, KeyMode.TXN)
    request, meta = asked(KeyMode.TXN, ApiVersion.V2, codec, UNCHANGED, 0)
    assert not request.HasField("rewrite_rule")
    assert (meta.cf_name, meta.range.start, meta.range.end) == ("write", encode(b"x\0\0\1a"), encode(b"x\0\0\1b"))
    request, meta = asked(KeyMode.TXN, ApiVersion.V2, codec, UNCHANGED, 5)
    assert request.request_type == import_sstpb_pb2.Legacy
    assert request.rewrite_rule == import_sstpb_pb2.RewriteRule(new_timestamp=5)
    assert meta.range.start == encode(b"x\0\0\1a")


@pytest.mark.parametrize(
    ("target", "start", "end"),
    [
        (KeyCodec(ApiVersion.V2, 2, KeyMode.TXN), b"x\0\0\2a", b"x\0\0\2b"),
        (KeyCodec(ApiVersion.V1, mode=KeyMode.TXN), b"a", b"b"),
    ],
)
def test_requests_for_rows_of_transactions_elsewhere(target: KeyCodec, start: bytes, end: bytes) -> None:
    """Prefixes and ranges are plain, in the new prefix: encoded ones would lose rows."""
    source = KeyCodec(ApiVersion.V2, 1, KeyMode.TXN)
    request, meta = asked(KeyMode.TXN, ApiVersion.V2, target, Rewrite.of(source, b"", target, b""), 5)
    assert request.request_type == import_sstpb_pb2.Keyspace
    rule = import_sstpb_pb2.RewriteRule(old_key_prefix=b"x\0\0\1", new_key_prefix=target.prefix, new_timestamp=5)
    assert request.rewrite_rule == rule
    assert (meta.range.start, meta.range.end, meta.api_version) == (start, end, target.api_version.value)
