"""Options of the data sources: what they mean, and what is refused with a message that helps and shows no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.openssl import KEYS
from tests.support.tools import ROOT
from tikv_br.datasource import TikvBackupDataSource, TikvDataSource
from tikv_br.datasource.backups import OPTIONS as BACKUP_OPTIONS
from tikv_br.datasource.changes import OPTIONS as STREAM_OPTIONS
from tikv_br.datasource.live import READ_OPTIONS, WRITE_OPTIONS
from tikv_br.datasource.options import Options, with_hints
from tikv_br.errors import TikvBrError, UsageError
from tikv_br.formats.keys.ranges import KeyRange

NAMES = ("start", "end", "prefix", "key_format")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (KeyRange(b"", b""),)),
        ({"start": "a", "end": "b"}, (KeyRange(b"a", b"b"),)),
        ({"prefix": "user:"}, (KeyRange(b"user:", b"user;"),)),
        ({"prefix": "ff", "key_format": "hex"}, (KeyRange(b"\xff", b""),)),
        ({"PREFIX": r"\x01a", "Key_Format": "escaped"}, (KeyRange(b"\x01a", b"\x01b"),)),
        ({"prefix": "b", "start": "ba"}, (KeyRange(b"ba", b"c"),)),
        ({"prefix": "b", "end": "a"}, ()),
    ],
)
def test_keys(given: dict[str, str], expected: tuple[KeyRange, ...]) -> None:
    """Bounds and prefix together select what both select; names are of any case, as in Spark."""
    assert Options(given, NAMES).keys() == expected


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"pd": "127.0.0.1:1", "prefixx": "a"}, "unknown option 'prefixx'", "prefix"),
        ({}, "option pd is missing", "host:port"),
        ({"pd": "nowhere"}, "not an address", ""),
        ({"pd": "127.0.0.1:1", "ttl": "yes"}, "option ttl is 'yes'", "true or false"),
        ({"pd": "127.0.0.1:1", "partition_bytes": "0"}, "option partition_bytes is '0'", "above 0"),
        ({"pd": "127.0.0.1:1", "start": "b", "end": "a"}, "start is not less than", "[start, end)"),
        ({"pd": "127.0.0.1:1", "start": "xy", "key_format": "hex"}, "option start: ", "key_format hex"),
        ({"pd": "127.0.0.1:1", "key_format": "base64"}, "option key_format is 'base64'", "raw, hex, escaped"),
        ({"pd": "127.0.0.1:1", "cert": "/a.pem"}, "must be passed together", ""),
    ],
)
def test_wrong_options_of_a_cluster_fail_at_load(given: dict[str, str], message: str, hint: str) -> None:
    """Before anything connects; Spark shows the hint, too, because it is a note of the error."""
    with pytest.raises(UsageError) as caught:
        TikvDataSource(given).schema()
    assert message in caught.value.message
    assert hint in caught.value.__notes__[0]


def test_columns_follow_the_options(tmp_path: Path) -> None:
    """Key and value always; expiry and timestamp if asked for."""
    assert TikvDataSource({"pd": "127.0.0.1:1"}).schema().names == ["key", "value"]
    assert TikvDataSource({"pd": "127.0.0.1:1", "ttl": "true"}).schema().names == ["key", "value", "expire_ts"]
    backup = TikvBackupDataSource({"path": str(tmp_path), "ttl": "TRUE", "ts": "true"})
    assert backup.schema().names == ["key", "value", "expire_ts", "ts"]
    assert TikvDataSource({"Log": str(tmp_path)}).schema().names == ["op", "key", "value", "expire_ts", "ts"]


def test_no_secret_in_options(tmp_path: Path) -> None:
    """Keys and credentials, which Spark would show, are refused, and not repeated."""
    for given in (
        {"path": str(tmp_path), "crypter_key": KEYS["aes128-ctr"]},
        {"path": f"s3://bucket/x?access-key=alice&secret-access-key={KEYS['aes128-ctr']}"},
        {"log": f"s3://bucket/x?access-key=alice&secret-access-key={KEYS['aes128-ctr']}"},
        {"log": "/x", "crypter_key": KEYS["aes128-ctr"]},
    ):
        source = TikvDataSource(given) if "log" in given else TikvBackupDataSource(given)
        with pytest.raises(UsageError) as caught:
            source.streamReader(source.schema()) if "log" in given else source.schema()
        assert KEYS["aes128-ctr"] not in f"{caught.value} {caught.value.__notes__}"


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the command line; what is read does not show in the location."""
    (tmp_path / "key").write_text(KEYS["aes256-ctr"])
    (tmp_path / "key").chmod(0o600)
    names = ("path", "crypter_method", "crypter_key_file")
    from_file = Options({"path": "/b", "crypter_key_file": str(tmp_path / "key")}, names).storage()
    monkeypatch.setenv("TIKV_BR_CRYPTER_KEY", KEYS["aes256-ctr"])
    from_environment = Options({"path": "/b"}, names).storage()
    assert from_file == from_environment
    assert from_file.crypter.method == "aes256-ctr"
    assert KEYS["aes256-ctr"] not in repr(from_file)


def test_hints_are_added_once_and_errors_stay_what_they_are() -> None:
    """The class, with its exit code, is that of the cause."""
    with pytest.raises(TikvBrError, match="no") as caught, with_hints():
        raise UsageError("no", hint="Say yes.")
    assert caught.value.__notes__ == ["Hint: Say yes."]


@pytest.mark.parametrize("name", sorted({*READ_OPTIONS, *WRITE_OPTIONS, *BACKUP_OPTIONS, *STREAM_OPTIONS} - {"path"}))
def test_options_are_documented(name: str) -> None:
    """On the page that the sources refer to."""
    assert f"`{name}" in (ROOT / "docs" / "spark.md").read_text()
