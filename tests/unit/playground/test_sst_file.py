from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.sst_surgery import exchange_keys, flip, without_properties, write_sst
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground.sst_file import SstInspection, SstStore, UnreadableSst, inspect

V1_ROWS = [(b"zk%03d" % number, b"value %03d" % number) for number in range(100)]
KEYS = {
    "good": b"z" + codec.encode(b"r\0\0\0key") + bytes(8),
    "no ts": b"z" + codec.encode(b"r\0\0\0key"),
    "not mce": b"zr\0\0\0key" + bytes(8),
    "no z": codec.encode(b"r\0\0\0key") + bytes(8),
}


def looked_into(tmp_path: Path, data: bytes, api_version: ApiVersion = ApiVersion.V1) -> SstInspection:
    """Facts about a file of those bytes."""
    path = tmp_path / "looked-into.sst"
    path.write_bytes(data)
    try:
        return inspect(path, api_version)
    finally:
        assert path.read_bytes() == data
        assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".scratch")] == []


def test_a_sound_file(tmp_path: Path) -> None:
    """Outermost keys and number of rows; nothing deadly; the file stays untouched and no scratch folder behind."""
    data = write_sst(tmp_path / "sound.sst", V1_ROWS)
    assert looked_into(tmp_path, data) == SstInspection(b"zk000", b"zk099", 100)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: flip(data, 50), "block checksum mismatch"),
        (lambda data: data[:-1], "Bad table magic number"),
        (lambda data: data[: len(data) // 2], "Bad table magic number"),
        (lambda _: b"", "file is too short"),
        (lambda data: without_properties(data, "rocksdb.external_sst_file.version"), "A non-external sst file"),
    ],
)
def test_damage_that_a_download_reports(tmp_path: Path, damage: object, said: str) -> None:
    """The error has RocksDB's own text, with the file's own path."""
    data = write_sst(tmp_path / "sound.sst", V1_ROWS)
    with pytest.raises(UnreadableSst, match=said) as error:
        looked_into(tmp_path, damage(data))  # type: ignore[operator]
    assert ".scratch" not in str(error.value)


@pytest.mark.parametrize(
    "names",
    [
        ["rocksdb.external_sst_file.global_seqno"],
        ["rocksdb.num.entries"],
        ["rocksdb.external_sst_file.version", "rocksdb.external_sst_file.global_seqno"],
    ],
)
def test_properties_without_which_a_store_dies(tmp_path: Path, names: list[str]) -> None:
    """Download does not see them missing; ingest is deadly."""
    data = without_properties(write_sst(tmp_path / "sound.sst", V1_ROWS), *names)
    facts = looked_into(tmp_path, data)
    assert facts.deadly
    assert facts.entries == 0


@pytest.mark.parametrize(("one", "other"), [(3, 4), (50, 70), (0, 99), (98, 99)])
def test_unsorted_rows_are_deadly(tmp_path: Path, one: int, other: int) -> None:
    """Wherever two rows have changed places."""
    data = exchange_keys(write_sst(tmp_path / "sound.sst", V1_ROWS), V1_ROWS[one][0], V1_ROWS[other][0])
    assert "unsorted" in looked_into(tmp_path, data).deadly


@pytest.mark.parametrize(
    ("api_version", "key", "value", "deadly"),
    [
        (ApiVersion.V1, b"zk", b"", ""),
        (ApiVersion.V1, b"k", b"v", "key without z"),
        (ApiVersion.V1TTL, b"zk", b"v" + bytes(8), ""),
        (ApiVersion.V1TTL, b"zk", bytes(7), "value without expiry"),
        (ApiVersion.V2, KEYS["good"], b"v\0", ""),
        (ApiVersion.V2, KEYS["good"], b"v\2", ""),
        (ApiVersion.V2, KEYS["good"], b"v" + bytes(8) + b"\1", ""),
        (ApiVersion.V2, KEYS["good"], b"v\4", "value without flag byte"),
        (ApiVersion.V2, KEYS["good"], b"", "value without flag byte"),
        (ApiVersion.V2, KEYS["good"], bytes(7) + b"\1", "value without expiry"),
        (ApiVersion.V2, KEYS["no ts"], b"v\0", "not memcomparable bytes and a timestamp"),
        (ApiVersion.V2, KEYS["not mce"], b"v\0", "not memcomparable bytes and a timestamp"),
        (ApiVersion.V2, KEYS["no z"], b"v\0", "key without z"),
    ],
)
def test_rows_that_kill(tmp_path: Path, api_version: ApiVersion, key: bytes, value: bytes, deadly: str) -> None:
    """Each API version's own rules for rows; the fault names the row."""
    facts = looked_into(tmp_path, write_sst(tmp_path / "rows.sst", [(key, value)]), api_version)
    if deadly:
        assert deadly in facts.deadly
        assert key.hex() in facts.deadly
    else:
        assert facts == SstInspection(key, key, 1)


def test_the_same_bytes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts go by content and API version, so three replicas' downloads cost one reading."""
    read: list[Path] = []

    def counting(path: Path, api_version: ApiVersion) -> SstInspection:
        read.append(path)
        return inspect(path, api_version)

    monkeypatch.setattr("tikv_br.playground.sst_file.inspect", counting)
    data = write_sst(tmp_path / "sound.sst", [*V1_ROWS, (b"zlast", str(time.time_ns()).encode())])
    stores = [SstStore(tmp_path / str(number), ApiVersion.V1) for number in range(3)]
    for store in stores:
        (store.folder / "x.sst").write_bytes(data)
        assert store.facts(store.folder / "x.sst").entries == 101
    other = SstStore(tmp_path / "ttl", ApiVersion.V1TTL)
    (other.folder / "x.sst").write_bytes(data)
    assert other.facts(other.folder / "x.sst").entries == 101
    assert [path.parent.name for path in read] == ["0", "ttl"]
