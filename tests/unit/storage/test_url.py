from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.errors import UsageError
from tikv_br.redaction import redact
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.url import AzureOptions, CloudFlags, GcsOptions, S3Options, StorageLocation, parse

KEYS = "access-key=AKIA&secret-access-key=hush/hu+sh="


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/backup/1", "/backup/1"),
        ("/backup/1/", "/backup/1"),
        ("/with space/100%", "/with space/100%"),
        ("/what?no=query", "/what?no=query"),
        ("local:///backup/1", "/backup/1"),
        ("local:///backup/1///", "/backup/1"),
        ("file:///backup/1", "/backup/1"),
        ("file://localhost/backup/1", "/backup/1"),
        ("local:///with%20space/100%25", "/with space/100%"),
        ("local:///a+b", "/a+b"),
        ("/", "/"),
        ("//twice", "/twice"),
    ],
)
def test_local_forms(url: str, path: str) -> None:
    """Bare paths are taken as they are, URLs percent-decoded, slashes at the end forgotten."""
    location = parse(url)
    assert (location.scheme, location.path) == ("local", path)
    assert location.bucket == ""


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b", "bucket", "a/b"),
        ("s3://bucket/a/b/", "bucket", "a/b"),
        ("s3://my.bucket-1/a%20b", "my.bucket-1", "a b"),
        ("s3://Old_Bucket/a", "Old_Bucket", "a"),
        ("s3://bucket/a+b?region=r", "bucket", "a+b"),
    ],
)
def test_s3_places(url: str, bucket: str, prefix: str) -> None:
    """Bucket and prefix, without slashes at its ends."""
    location = parse(url)
    assert (location.scheme, location.bucket, location.path) == ("s3", bucket, prefix)


def test_s3_parameters() -> None:
    """Every parameter of the Go tool, spelled with - or _, in any case; + in a secret stays +."""
    location = parse(
        "s3://bkt/p?endpoint=http://127.0.0.1:9000/&REGION=eu-west-1&storage_class=STANDARD_IA&sse=aws:kms"
        f"&sse-kms-key-id=k&provider=ceph&force_path_style=TRUE&use-accelerate-endpoint=false&{KEYS}&session-token=t%26t"
    )
    assert location.s3 == S3Options(
        endpoint="http://127.0.0.1:9000",
        region="eu-west-1",
        storage_class="STANDARD_IA",
        sse="aws:kms",
        sse_kms_key_id="k",
        provider="ceph",
        force_path_style=True,
        access_key=SecretText("AKIA"),
        secret_access_key=SecretText("hush/hu+sh="),
        session_token=SecretText("t&t"),
    )


def test_parameters_override_flags() -> None:
    """The URL wins over the flags, which hold for all it does not say."""
    flags = S3Options(endpoint="http://flag:1", region="flag", provider="aws")
    options = parse("s3://bkt/p?region=url", CloudFlags(flags)).s3
    assert (options.endpoint, options.region, options.provider) == ("http://flag:1", "url", "aws")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", True),
        ("force-path-style=true", True),
        ("force-path-style=0", False),
        ("provider=alibaba", False),
        ("provider=netease&force-path-style=true", False),
        ("provider=ceph", True),
    ],
)
def test_path_style(said: str, expected: bool) -> None:
    """Path style by default, as in the Go tool, but never for the providers that know none."""
    assert parse(f"s3://bkt/p?{said}").s3.path_style is expected


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "no storage was passed"),
        ("relative/path", "the storage 'relative/path' is neither a URL nor an absolute path"),
        ("s3:/bucket/p", "neither a URL nor an absolute path"),
        ("local://relative/path", "absolute path"),
        ("file://host/path", "absolute path"),
        ("local:///p?endpoint=x", "does not accept parameters"),
        ("local:///p%00", "absolute path"),
        ("/line\nbreak", "control character"),
        ("/backup/\udcff", "not UTF-8"),
        ("s3://bucket/\udcff", "not UTF-8"),
        ("local:///backup/%FF", "not UTF-8"),
        ("s3://bucket/%ff", "not UTF-8"),
        ("s3://bucket/p?region=%ff", "not UTF-8"),
        ("gcs://", "name of a bucket"),
        ("gs://Upper/p", "name of a bucket"),
        ("gcs://a..b/p", "name of a bucket"),
        ("gcs://bucket/a/../b", "prefix"),
        ("gcs://bucket/p?predefined-acl=private", "unknown parameter 'predefined-acl'"),
        ("gcs://bucket/p?account-key=hush", "unknown parameter 'account-key'"),
        ("gcs://bucket/p?endpoint=http://h/path", "the GCS endpoint must have only"),
        ("hdfs://n/p", "'hdfs' is not supported: HDFS is out of scope"),
        ("azure://", "name of a container"),
        ("azure://Upper/p", "name of a container"),
        ("azure://ab/p", "name of a container"),
        ("azblob://a--b/p", "name of a container"),
        ("azure://key:hush@container/p", "name of a container"),
        ("azure://container/a/../b", "prefix"),
        ("azure://container/p?region=x", "unknown parameter 'region'"),
        ("azure://container/p?account-key=hush!", "not base64"),
        ("azure://container/p?account-key=aHVzaA==&sas-token=hush", "not both"),
        ("azure://container/p?account-name=A", "3 to 24 lower-case"),
        ("azure://container/p?endpoint=ftp://h", "the Azure endpoint is not an http:// or https:// URL"),
        ("azure://container/p?endpoint=http://u:hush@h", "the Azure endpoint must have only"),
        ("noop://", "'noop' is not supported"),
        ("s3://", "name of a bucket"),
        ("s3:///prefix", "name of a bucket"),
        ("s3://key:hush@bucket/p", "name of a bucket"),
        ("s3://bucket:9000/p", "name of a bucket"),
        ("s3://a_B..c/p", "empty part between dots"),
        ("s3://bucket./p", "empty part between dots"),
        ("s3://ab/p", "'ab' has 2 characters; S3 allows 3 to 255"),
        (f"s3://{'b' * 256}/p", "256 characters"),
        ("s3://127.0.0.1/p", "is an IP address"),
        ("s3://my bucket/p", "name of a bucket"),
        ("s3://-bucket/p", "name of a bucket"),
        ("s3://[bad/p", "does not parse"),
        ("s3://bkt/a//b", "prefix"),
        ("s3://bkt/a/../b", "prefix"),
        ("s3://bkt/p?secret-access-key=hush#1", "'#'"),
        ("s3://bkt/p?bucket=x", "unknown parameter 'bucket'"),
        ("s3://bkt/p?secret-acces-key=hush", "unknown parameter 'secret-acces-key'"),
        ("s3://bkt/p?region=a&region=b", "appears twice"),
        ("s3://bkt/p?force-path-style=maybe", "true or false"),
        ("s3://bkt/p?use-accelerate-endpoint=true", "accelerated endpoints"),
        ("s3://bkt/p?acl=public-read", "unknown parameter 'acl'"),
        ("s3://bkt/p?sse=rot13", "s3.sse"),
        ("s3://bkt/p?sse-kms-key-id=k", "requires s3.sse aws:kms"),
        ("s3://bkt/p?sse=AES256&sse-kms-key-id=k", "requires s3.sse aws:kms"),
        ("s3://bkt/p?access-key=a", "both or none"),
        ("s3://bkt/p?secret-access-key=hush", "both or none"),
        ("s3://bkt/p?session-token=hush", "a session token requires"),
        ("s3://bkt/p?endpoint=127.0.0.1:9000", "not an http:// or https:// URL"),
        ("s3://bkt/p?endpoint=ftp://h", "not an http:// or https:// URL"),
        ("s3://bkt/p?endpoint=http://", "not an http:// or https:// URL"),
        ("s3://bkt/p?endpoint=http://h:port", "does not parse"),
        ("s3://bkt/p?endpoint=http://u:hush@h", "must have only scheme, host and port"),
        ("s3://bkt/p?endpoint=http://h/path", "must have only scheme, host and port"),
    ],
)
def test_refusals_say_what_and_no_secret(url: str, sentence: str) -> None:
    """Unsupported URLs are UsageErrors with a sentence; none repeats a secret from the URL."""
    with pytest.raises(UsageError) as caught:
        parse(url)
    assert sentence in caught.value.message
    assert "hush" not in str(caught.value.to_json())


def test_azure_places() -> None:
    """Container, prefix and parameters; `azblob` is the same, and flags hold for what the URL does not say."""
    flags = CloudFlags(S3Options(patience=7, region="eu"), AzureOptions(access_tier="Hot", account_name="flagged"))
    location = parse(
        "azblob://container/a/b/?endpoint=http://h:1/acc/&account_name=acc&account-key=aHVzaA==&access-tier=Cool", flags
    )
    assert location == StorageLocation(
        "azure",
        "a/b",
        "container",
        azure=AzureOptions("http://h:1/acc", "acc", "Cool", SecretText("aHVzaA=="), SecretText()),
    )
    assert (location.patience, location.options.storage_class, location.has_secrets) == (7, "Cool", True)
    assert parse("azure://container", flags).azure == flags.azure
    assert not parse("azure://container", flags).has_secrets
    assert parse("azure://container?sas-token=?sv=1%26sig=hush").azure.sas_token.reveal() == "sv=1&sig=hush"


def test_gcs_places() -> None:
    """Bucket, prefix and parameters; `gs` is the same, and the Go tool's endpoint of the JSON API is accepted."""
    flags = CloudFlags(gcs=GcsOptions(storage_class="NEARLINE", credentials_file="/key"))
    location = parse("gs://my_bucket.1/a/b?endpoint=http://h:1/storage/v1/", flags)
    options = GcsOptions("http://h:1", "NEARLINE", "/key")
    assert location == StorageLocation("gcs", "a/b", "my_bucket.1", gcs=options)
    assert location.redacted() == "gcs://my_bucket.1/a/b?endpoint=http://h:1&storage-class=NEARLINE"
    assert (location.options.storage_class, location.has_secrets) == ("NEARLINE", False)
    assert pickle.loads(pickle.dumps(location)) == location


def test_azure_secrets_are_never_shown() -> None:
    """Neither text, repr, nor dictionary form hold a key or token; pickle keeps it, and the redacted URL is of the same place."""
    for secret in ("account-key=aHVzaA==", "sas-token=sv=1%26sig=aHVzaA=="):
        location = parse(f"azure://container/p?account-name=acc&endpoint=http://h:1/acc&{secret}")
        shown = f"{location} {location!r} {location.azure!r} {dataclasses.asdict(location)} {location.redacted()}"
        assert "aHVzaA" not in shown
        assert pickle.loads(pickle.dumps(location)) == location
        assert location.redacted() == "azure://container/p?endpoint=http://h:1/acc&account-name=acc"
        assert "aHVzaA" not in redact(f"--storage azure://container/p?{secret} --azblob.account-key aHVzaA==")


def test_refused_flags() -> None:
    """The flags are checked as the parameters are."""
    with pytest.raises(UsageError, match=r"s3\.sse must be one of"):
        parse("s3://bkt/p", CloudFlags(S3Options(sse="private")))


def test_secrets_are_never_shown() -> None:
    """Neither text, repr, dictionary form nor URL of a location hold a credential, and pickle keeps them all."""
    location = parse(f"s3://bkt/p?endpoint=http://h:1&{KEYS}&session-token=hush")
    shown = f"{location} {location!r} {location.s3!r} {dataclasses.asdict(location)} {location.redacted()}"
    assert "hush" not in shown
    assert "AKIA" not in shown
    copy = pickle.loads(pickle.dumps(location))
    assert copy == location
    assert copy.s3.secret_access_key.reveal() == "hush/hu+sh="


def test_child() -> None:
    """A child is below its parent and keeps its options."""
    assert parse("/a").child("b").path == "/a/b"
    assert parse("/").child("b").path == "/b"
    assert parse("s3://bkt/p?region=r").child("c/d").redacted() == "s3://bkt/p/c/d?region=r"
    assert parse("s3://bkt").child("c").path == "c"


SEGMENT = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/"), min_size=1, max_size=8
).filter(lambda text: text not in {".", ".."})
PATH = st.lists(SEGMENT, max_size=4).map("/".join)


@given(
    PATH, st.sampled_from(["", "http://h:1", "https://[::1]:9000"]), st.sampled_from(["", "eu-west-1"]), st.booleans()
)
def test_redacted_is_a_url_of_the_same_place(path: str, endpoint: str, region: str, style: bool) -> None:
    """The redacted URL of a location parses to the same place, whatever characters its path has."""
    options = S3Options(endpoint=endpoint, region=region, force_path_style=style)
    for location in (StorageLocation("s3", path, "bucket", options), StorageLocation("local", f"/{path}")):
        assert parse(location.redacted()) == location


def test_light_to_import() -> None:
    """The command line parses URLs without loading any storage client."""
    script = (
        "import sys; import tikv_br.storage.url, tikv_br.storage.base, tikv_br.storage.open;"
        "print([m for m in ('obstore', 'boto3', 'botocore', 'google.protobuf', 'pyarrow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_relative_path_is_refused_with_the_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint can be copied; a text that may hold a secret is not repeated."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        parse("backups/full")
    assert refused.value.hint is not None
    assert f"Pass {tmp_path}/backups/full if" in refused.value.hint
    with pytest.raises(UsageError) as refused:
        parse("s3:bucket?secret-access-key=x")
    assert "secret" not in f"{refused.value.message}{refused.value.hint}"
