"""Errors of stores that end a backup at once, and those that are retried."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tikv_br import retry
from tikv_br.backup.store_responses import STORAGE_ERROR, classify_error, longest_wait
from tikv_br.cluster.pb import brpb_pb2, errorpb_pb2
from tikv_br.cluster.region_errors import REACTIONS, Action
from tikv_br.errors import (
    ApiVersionMismatch,
    RequestRefused,
    StorageDenied,
    StorageFull,
    StorageObjectMissing,
    StorageReadOnly,
    TikvBrError,
)

NOWHERE = brpb_pb2.StorageBackend(noop=brpb_pb2.Noop())


@pytest.mark.parametrize("kind", REACTIONS)
def test_every_region_error_waits_as_its_table_says(kind: str) -> None:
    """Each region error has the backoff of the table, or is fatal without one."""
    error = brpb_pb2.Error()
    getattr(error.region_error, kind).SetInParent()
    if REACTIONS[kind].action is Action.FAIL:
        with pytest.raises(RequestRefused, match="store 4"):
            classify_error(error, "store 4", NOWHERE)
    else:
        assert classify_error(error, "store 4", NOWHERE).backoff is REACTIONS[kind].backoff


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('Io(Os { code: 13, kind: PermissionDenied, message: "Permission denied" })', StorageDenied),
        ('Io(Custom { kind: Other, error: "failed to put object AccessDenied" })', StorageDenied),
        ('Io(Custom { kind: Other, error: "failed to put object: AuthenticationFailed" })', StorageDenied),
        ('Io(Custom { kind: Other, error: "failed to put object: AuthorizationPermissionMismatch" })', StorageDenied),
        ('Io(Custom { kind: Other, error: "failed to put object: ContainerNotFound" })', StorageObjectMissing),
        (
            "Io(Custom { kind: Other, error: \"failed to put object rusoto error Couldn't find AWS credentials in sources (No",
            StorageDenied,
        ),
        ('Io(Os { code: 28, kind: StorageFull, message: "No space left on device" })', StorageFull),
        ('Io(Os { code: 30, kind: ReadOnlyFilesystem, message: "Read-only file system" })', StorageReadOnly),
        ('Io(Os { code: 2, kind: NotFound, message: "No such file or directory" })', StorageObjectMissing),
        ('Other("[endpoint.rs:1136]: invalid backup version, cur: V2, dst: V1")', ApiVersionMismatch),
    ],
)
def test_messages_that_no_retry_cures(message: str, expected: type[TikvBrError]) -> None:
    """The store and what it said are in the message; storage troubles hint at the other engine."""
    with pytest.raises(expected, match="store 4") as raised:
        classify_error(brpb_pb2.Error(msg=message), "store 4", NOWHERE)
    assert message in raised.value.message
    assert (expected in {ApiVersionMismatch, StorageFull}) != ("--engine scan" in raised.value.hint)


@pytest.mark.parametrize("name", ["kind: NotFound", "NoSuchBucket", "AccessDenied", "403 Forbidden", "code: 28,"])
def test_names_of_users_cure_nothing_and_kill_nothing(name: str) -> None:
    """A store's text contains bucket, prefix and endpoint; what they say is not what has happened."""
    for place in (
        brpb_pb2.S3(bucket="bucket", prefix=f"of/{name}", endpoint="http://127.0.0.1:9"),
        brpb_pb2.S3(bucket=name, prefix="prefix", endpoint="http://127.0.0.1:9"),
    ):
        url = f"http://127.0.0.1:9/{place.bucket}/{quote(place.prefix)}/1_default.sst"
        said = f"failed to put object {place.prefix}/1_default.sst: Error performing PUT {url} in 1ms - HTTP error"
        error = brpb_pb2.Error(msg=f'Io(Custom {{ kind: Other, error: "{said}" }})')
        assert classify_error(error, "store 4", brpb_pb2.StorageBackend(s3=place)).backoff is STORAGE_ERROR


def test_another_cluster_is_fatal() -> None:
    """With the id that answered."""
    with pytest.raises(RequestRefused, match="cluster 9"):
        classify_error(
            brpb_pb2.Error(cluster_id_error=brpb_pb2.ClusterIDError(current=9, request=1)), "store 4", NOWHERE
        )


def test_other_messages_are_retried() -> None:
    """A storage that hiccups is asked again, within the budget."""
    trouble = classify_error(
        brpb_pb2.Error(msg='Io(Custom { kind: Other, error: "connection reset" })'), "store 4", NOWHERE
    )
    assert trouble.backoff is STORAGE_ERROR
    assert "connection reset" in trouble.cause


def test_a_store_without_timestamps_waits_for_pd() -> None:
    """The storage is well: its patience is not spent."""
    error = brpb_pb2.Error(msg='Other("[endpoint.rs]: fail to flush causal ts, BatchRenew(\\"Pd unknown error\\")")')
    assert classify_error(error, "store 4", NOWHERE).backoff is retry.PD_UNAVAILABLE


def test_the_longest_wait_is_waited() -> None:
    """A wait that a store requests has precedence; without one, leaders are located again."""
    busy = errorpb_pb2.Error(server_is_busy=errorpb_pb2.ServerIsBusy(backoff_ms=2500))
    moved = errorpb_pb2.Error(not_leader=errorpb_pb2.NotLeader())
    troubles = [classify_error(brpb_pb2.Error(region_error=error), "store 4", NOWHERE) for error in (moved, busy)]
    assert longest_wait(troubles) is troubles[1]
    assert longest_wait(troubles).at_least == 2.5
    assert longest_wait([]).backoff is retry.REGION_MISS
