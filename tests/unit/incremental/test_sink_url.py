from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.sinks.open import SinkOptions
from tikv_br.incremental.sinks.url import (
    BlackholeTarget,
    FileTarget,
    LogTarget,
    StdoutTarget,
    Target,
    TikvTarget,
    check_shared,
    parse,
)
from tikv_br.storage.url import AzureOptions, S3Options, StorageLocation


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("tikv://a:1", TikvTarget(("a:1",))),
        ("tikv://a:1,b:2/", TikvTarget(("a:1", "b:2"))),
        ("tikv://[::1]:2379?keyspace=7&api-version=V1ttl", TikvTarget(("[::1]:2379",), "7", ApiVersion.V1TTL)),
        ("tikv://a:1?keyspace=my%20own", TikvTarget(("a:1",), "my own")),
        ("file:///a/b%20c.jsonl", FileTarget(Path("/a/b c.jsonl"))),
        ("file:///a/b#1.jsonl", FileTarget(Path("/a/b#1.jsonl"))),
        ("-", StdoutTarget()),
        ("stdout://", StdoutTarget()),
        ("blackhole://", BlackholeTarget()),
        ("local:///a/b", LogTarget(StorageLocation("local", "/a/b"))),
        (
            "s3://bucket/a?id=one&endpoint=http://h:9000&flush-interval=1.5m&flush-size=2KiB",
            LogTarget(StorageLocation("s3", "a", "bucket", S3Options(endpoint="http://h:9000")), "one", 90.0, 2048),
        ),
        ("gs://bucket/a?id=one", LogTarget(StorageLocation("gcs", "a", "bucket"), "one")),
        (
            "azblob://container/a?account_name=acc&flush-size=2KiB",
            LogTarget(
                StorageLocation("azure", "a", "container", azure=AzureOptions(account_name="acc")), flush_size=2048
            ),
        ),
    ],
)
def test_reads_addresses(url: str, target: Target) -> None:
    """Each form of address is the target that it names."""
    assert parse(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "kafka://a:1",
        "kafka://a:1/topic?protocol=avro",
        "tikv://",
        "tikv://a",
        "tikv://a:1/path",
        "tikv://a:1?keyspce=1",
        "tikv://a:1?api-version=v3",
        "tikv://a:1#?keyspace=1",
        "file://relative/path",
        "file:///",
        "file:///a?b=c",
        "stdout://x",
        "blackhole://x?y",
        "s3://",
        "s3://bucket/a?flush-interval=soon",
        "s3://bucket/a?flush-interval=0",
        "local:///a?flush-size=1XB",
        "local:///a?what=else",
    ],
)
def test_refuses_what_is_no_address(url: str) -> None:
    """Invalid addresses are usage errors that name --sink or the address."""
    with pytest.raises(UsageError):
        parse(url)


def test_options_reach_another_process() -> None:
    """Those of a sink can be pickled."""
    assert pickle.loads(pickle.dumps(SinkOptions())) == SinkOptions()


def test_texts_name_the_target() -> None:
    """A target reads as its address."""
    for url in ("tikv://a:1,b:2?keyspace=7", "file:///a/b", "stdout://", "blackhole://"):
        assert str(parse(url)) == url


def test_texts_of_logs_have_their_options() -> None:
    """A changefeed's captures read them: nothing but credentials is lost."""
    for url in (
        "s3://bucket/a?endpoint=http://h:9000&id=one&flush-interval=300ms&flush-size=2KiB",
        "gcs://bucket/a?storage-class=NEARLINE&id=one",
        "azure://container/a?account-name=acc&access-tier=Cool",
        "local:///a/b",
    ):
        assert parse(str(parse(url))) == parse(url)
    assert "secret" not in str(parse("s3://bucket/a?access-key=secret&secret-access-key=secret2"))


@pytest.mark.parametrize("url", ["-", "file:///tmp/x", "local:///tmp/x"])
def test_sinks_that_machines_cannot_share_are_refused(url: str) -> None:
    """A changefeed, whose captures may be anywhere, needs a cluster as sink."""
    with pytest.raises(UsageError, match="several machines"):
        check_shared(parse(url))
    clouds = ("s3://bucket/prefix", "gcs://bucket/prefix", "azure://container/prefix?account-name=acc")
    for shared in ("tikv://pd:2379", "blackhole://", "kafka://h:1/topic", *clouds):
        check_shared(parse(shared))


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/prefix?access-key=a&secret-access-key=b",
        "gcs://bucket/prefix?credentials-file=/key.json",
        "azure://container/prefix?account-key=aHVzaA==",
        "azure://container/prefix?sas-token=sig%3Dhush",
    ],
)
def test_credentials_are_not_saved_in_etcd(url: str) -> None:
    """Nor are they left out silently: captures would then use others."""
    with pytest.raises(UsageError, match="credentials"):
        check_shared(parse(url))
