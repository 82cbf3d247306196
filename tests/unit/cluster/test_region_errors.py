"""Every refusal that a store can utter has a meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tikv_br.backup.store_responses import classify_error
from tikv_br.cluster.pb import brpb_pb2, errorpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.region_errors import (
    MESSAGE_ONLY,
    REACTIONS,
    Action,
    RegionErrorSeen,
    check_error_text,
    check_pairs,
    check_region_error,
)
from tikv_br.errors import ApiVersionMismatch, RequestRefused, UsageError

KINDS = [field.name for field in errorpb_pb2.Error.DESCRIPTOR.fields if field.name != "message"]


def test_every_field_of_errorpb_has_a_reaction() -> None:
    """The table and the message have the same fields: a new one cannot go unnoticed."""
    assert sorted(REACTIONS) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_recognised(kind: str) -> None:
    """An error with one field set is of that kind and reacts as its row says."""
    error = errorpb_pb2.Error(message="m")
    getattr(error, kind).SetInParent()
    seen = RegionErrorSeen(error)
    assert seen.kind == kind
    assert seen.reaction is REACTIONS[kind]
    assert str(seen) == f"{kind}: m"


def test_a_store_without_timestamps_is_asked_again() -> None:
    """Nothing is written, so any write may be repeated; a store has no field for it."""
    with pytest.raises(RegionErrorSeen) as caught:
        check_error_text('"[src/storage/mod.rs:3066]: Fail to get ts: Batch renew error \\"Pd unknown error\\""')
    assert caught.value.reaction.action is Action.RETRY


def test_an_error_with_only_a_message_is_tried_elsewhere() -> None:
    """A closing store answers with text only; the region may soon be led elsewhere."""
    seen = RegionErrorSeen(errorpb_pb2.Error(message="TiKV is Closing"))
    assert seen.kind == ""
    assert seen.reaction is MESSAGE_ONLY
    assert MESSAGE_ONLY.action is Action.RELOCATE


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Api version in request does not match with TiKV storage, cmd: raw_get, storage: V1", ApiVersionMismatch),
        ("Error(ApiVersionNotMatched { cmd: raw_scan, storage_api_version: V1 })", ApiVersionMismatch),
        ("Key mode mismatched with the request mode, cmd: raw_put, storage: V2, key: 61", ApiVersionMismatch),
        ("ttl is not enabled, but get put request with ttl", UsageError),
        ("max key size exceeded, size: 9000, limit: 8192", UsageError),
        ("cf is deprecated in API V2, cf name: default", RequestRefused),
        ("anything else", RequestRefused),
    ],
)
def test_error_texts_have_classes(text: str, error: type[Exception]) -> None:
    """The strings of wire-facts 1.6 map to errors of ours that carry the text."""
    with pytest.raises(error, match="a store refused the request"):
        check_error_text(text)
    with pytest.raises(error):
        check_pairs([kvrpcpb_pb2.KvPair(error=kvrpcpb_pb2.KeyError(abort=text))])


@pytest.mark.parametrize(
    "text", ["default not found: key:6B, maybe read", "Error(Mvcc(Error(DefaultNotFound { key: [] })))"]
)
def test_missing_values_are_explained(text: str) -> None:
    """As the coprocessor, a read and a backup say it; no correction of the request would help."""
    for check in (
        check_error_text,
        lambda each: classify_error(brpb_pb2.Error(msg=each), "s", brpb_pb2.StorageBackend()),
    ):
        with pytest.raises(RequestRefused, match="values of transactions are missing in the cluster") as raised:
            check(text)
        assert "empty cluster" in raised.value.hint


def test_no_text_is_no_error() -> None:
    """Answers without error pass."""
    check_error_text("")
    check_pairs([])
    check_pairs([kvrpcpb_pb2.KvPair(key=b"k")])
    check_region_error(kvrpcpb_pb2.RawGetResponse())


def test_a_key_out_of_the_region_in_words_is_a_region_error() -> None:
    """V1 stores say only in words that a key is not theirs; that is routed like its typed form."""
    with pytest.raises(RegionErrorSeen) as caught:
        check_error_text("unknown error Key 61 is out of [region 4] [62, 63)")
    assert caught.value.kind == "key_not_in_region"


def test_the_manual_lists_every_kind_with_its_waits() -> None:
    """The table of docs/cluster-client.md and the code say the same."""
    manual = (Path(__file__).parents[3] / "docs" / "cluster-client.md").read_text()
    rows = [line for line in manual.splitlines() if line.startswith("| `")]
    for kind, reaction in REACTIONS.items():
        (row,) = (row for row in rows if f"`{kind}`" in row.split("|")[1])
        waits = row.split("|")[3].strip()
        backoff = reaction.backoff
        expected = "" if reaction.action is Action.FAIL else f"{span(backoff.base)} to {span(backoff.cap)}"
        assert waits == expected, kind


def span(seconds: float) -> str:
    """Seconds as the manual writes them."""
    return f"{seconds:g} s" if seconds >= 0.1 else f"{seconds * 1000:g} ms"
