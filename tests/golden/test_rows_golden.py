from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.rows import from_storage, live, to_storage


@dataclass(frozen=True)
class Backup:
    """A backup that real servers made: what must come out of it, and what they said of it."""

    meta: dict[str, Any]
    codec: KeyCodec
    expected: pa.RecordBatch

    @property
    def keys(self) -> list[bytes]:
        """All user keys, ascending."""
        return list(self.expected["key"].to_pylist())

    def between(self, first: bytes, last: bytes) -> pa.RecordBatch:
        """The expected rows from one key to another, both included."""
        start = self.keys.index(first)
        return self.expected.slice(start, self.keys.index(last) - start + 1)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a compressed file of JSON lines."""
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
        yield from map(json.loads, io.TextIOWrapper(plain, "utf-8"))


def hex_column(values: list[str]) -> pa.LargeBinaryArray:
    """A column of bytes given in hex."""
    return columns.from_list([bytes.fromhex(value) for value in values])


def read_backup(golden: Path, name: str) -> Backup:
    """Read the recorded backup of that name; keys lose their prefix."""
    folder = golden / "backups" / name
    meta = json.loads((folder / "meta.json").read_text())
    codec = KeyCodec(ApiVersion.from_label(meta["dst_api"]), meta.get("keyspace_id", 0))
    rows = list(json_lines(folder / meta["expected"]))
    expected = columns.records(
        columns.from_list([codec.user_key(bytes.fromhex(row["k"])) for row in rows]),
        hex_column([row["v"] for row in rows]),
        expire_ts=np.array([row["e"] for row in rows], np.uint64),
        ts=np.array([row.get("ts", 0) for row in rows], np.uint64),
    )
    return Backup(meta, codec, expected)


def read_dump(golden: Path, name: str) -> pa.RecordBatch:
    """The rows of an SST as RocksDB's own sst_dump printed them."""
    rows = list(json_lines(golden / "sst" / f"{name}.jsonl.zst"))
    return columns.storage_rows(hex_column([row["k"] for row in rows]), hex_column([row["v"] for row in rows]))


@pytest.fixture(scope="module")
def backups(golden: Path) -> dict[str, Backup]:
    """All recorded backups by name."""
    return {path.name: read_backup(golden, path.name) for path in sorted((golden / "backups").iterdir())}


@pytest.fixture(scope="module")
def dumps(golden: Path) -> dict[str, pa.RecordBatch]:
    """All dumped SSTs by name: ``<backup>__<file>``."""
    names = json.loads((golden / "sst" / "index.json").read_text())
    assert {name.split("__")[0] for name in names} == {path.name for path in (golden / "backups").iterdir()}
    return {name: read_dump(golden, name) for name in names}


def test_rows_of_real_ssts_decode_to_the_rows_of_the_cluster(
    backups: dict[str, Backup], dumps: dict[str, pa.RecordBatch]
) -> None:
    """The rows of every dumped SST, of all API versions and keyspaces, are the expected rows between its ends."""
    for name, storage in dumps.items():
        backup = backups[name.split("__")[0]]
        decoded = from_storage(storage, backup.codec)
        expected = backup.between(decoded["key"][0].as_py(), decoded["key"][-1].as_py())
        assert decoded.equals(expected), name
        assert live(decoded, int(backup.meta["before"]["wall"])) is decoded, name


def test_rows_of_the_cluster_encode_to_the_bytes_of_real_ssts(
    backups: dict[str, Backup], dumps: dict[str, pa.RecordBatch]
) -> None:
    """The expected rows between the ends of every dumped SST become its keys and values, byte for byte."""
    for name, storage in dumps.items():
        backup = backups[name.split("__")[0]]
        users = from_storage(storage, backup.codec)["key"]
        rows = backup.between(users[0].as_py(), users[-1].as_py())
        assert to_storage(rows, backup.codec).equals(storage), name


@pytest.mark.parametrize("source", ["v1", "v1ttl"])
def test_converted_rows_equal_what_stores_convert(
    source: str, backups: dict[str, Backup], dumps: dict[str, pa.RecordBatch]
) -> None:
    """Rows of V1 and V1TTL clusters, without a ts, become the very SST rows that a store wrote for V2."""
    target = KeyCodec(ApiVersion.V2)
    converted = {name: rows for name, rows in dumps.items() if name.startswith(f"{source}_to_v2__")}
    assert converted
    for name, storage in converted.items():
        users = from_storage(storage, target)["key"]
        rows = backups[source].between(users[0].as_py(), users[-1].as_py())
        assert not any(rows["ts"].to_pylist())
        assert to_storage(rows, target, default_ts=1).equals(storage), name


def test_checksums_equal_those_of_the_servers(backups: dict[str, Backup]) -> None:
    """All rows of every backup sum up to what the servers said: RawChecksum, and the files in backupmeta."""
    for name, backup in backups.items():
        found = checksum(backup.expected["key"], backup.expected["value"], backup.codec.prefix)
        assert found == Checksum(**backup.meta["expected_sums"]), name
        assert found == Checksum(**backup.meta["backupmeta_file_sums"]), name


def test_checksums_of_files_equal_those_in_backupmeta(
    backups: dict[str, Backup], dumps: dict[str, pa.RecordBatch]
) -> None:
    """The rows of each dumped SST have the checksum that the store wrote into backupmeta for that file."""
    for name, storage in dumps.items():
        backup_name, file_name = name.split("__", 1)
        backup = backups[backup_name]
        [file] = [file for file in backup.meta["backupmeta"]["files"] if Path(file["name"]).stem == file_name]
        rows = from_storage(storage, backup.codec)
        assert checksum(rows["key"], rows["value"], backup.codec.prefix) == Checksum(
            int(file["crc64xor"]), int(file["total_kvs"]), int(file["total_bytes"])
        ), name


def test_region_bounds_of_real_clusters_decode(backups: dict[str, Backup]) -> None:
    """The bounds of every recorded region decode to the RPC keys that were split at, and encode back to the bounds."""
    seen = 0
    for backup in backups.values():
        codec = KeyCodec(ApiVersion.from_label(backup.meta["cluster_api"]))
        for region in backup.meta["before"]["regions"]:
            for end in ("start", "end"):
                bound, rpc = bytes.fromhex(region[f"{end}_key"]), bytes.fromhex(region[f"rpc_{end}"])
                assert codec.from_bound(bound) == rpc
                assert codec.bound(rpc) == bound
                seen += 1
    assert seen
