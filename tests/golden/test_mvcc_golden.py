"""Backups that real stores made of transactions: what is in their files, joined, is what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.txn_backups import recorded_value
from tests.unit.formats.sst.tables import write as write_table
from tikv_br.cluster.pb import brpb_pb2, coprocessor_pb2, tipb_pb2
from tikv_br.formats import columns, mvcc
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource

CASES = ["full", "full-later", "incremental", "gc-fence"]


@dataclass(frozen=True)
class Recorded:
    """A recorded backup."""

    folder: Path
    prefix: bytes

    @property
    def content(self) -> dict[str, Any]:
        """The expected rows."""
        found: dict[str, Any] = json.loads((self.folder / "rows.json").read_text())
        return found

    def parts(self) -> Iterator[list[brpb_pb2.File]]:
        """The files of each answer that has any."""
        for path in sorted(self.folder.glob("response-*.pb")):
            files = list(brpb_pb2.BackupResponse.FromString(path.read_bytes()).files)
            if files:
                yield files

    def batches(self, files: list[brpb_pb2.File], family: str) -> Iterator[pa.RecordBatch]:
        """The rows of a part's file of a column family, if it has one."""
        for file in files:
            if file.cf == family:
                yield from SstReader(MemorySource((self.folder / "files" / file.name).read_bytes())).batches(max_rows=7)

    def joined(self, files: list[brpb_pb2.File]) -> pa.Table:
        """The rows of a part."""
        return pa.Table.from_batches(
            mvcc.join(self.batches(files, "write"), self.batches(files, "default"), self.prefix), columns.SCHEMA
        )

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all parts."""
        return sorted(
            (row for files in self.parts() for row in self.joined(files).to_pylist()), key=lambda row: row["key"]
        )


@pytest.fixture(params=["v1", "v2"])
def version(request: pytest.FixtureRequest) -> str:
    """The API version of the cluster."""
    return str(request.param)


@pytest.fixture
def recorded(version: str, golden: Path, request: pytest.FixtureRequest) -> Recorded:
    """A backup of that cluster."""
    return Recorded(golden / "txn" / version / request.param, b"x\0\0\1" if version == "v2" else b"")


@pytest.mark.parametrize("recorded", CASES, indirect=True)
def test_joined_are_the_rows(recorded: Recorded) -> None:
    """Keys, values, deletes and, where it was recorded, commit timestamps."""
    rows, expected = recorded.rows(), recorded.content["rows"]
    assert [recorded.prefix + row["key"] for row in rows] == [bytes.fromhex(row["key"]) for row in expected]
    assert [row["value"] for row in rows] == [recorded_value(row) for row in expected]
    assert [row["deleted"] for row in rows] == [row.get("op") == "del" for row in expected]
    assert not any(row["expire_ts"] for row in rows)
    for row, wanted in zip(rows, expected, strict=True):
        assert row["ts"] == wanted.get("commit_ts", row["ts"])


@pytest.mark.parametrize("recorded", ["full", "full-later", "gc-fence"], indirect=True)
def test_commit_timestamps(recorded: Recorded) -> None:
    """Each row has the commit ts of its last write up to backup-ts."""
    place = recorded.folder if (recorded.folder / "writes.json").exists() else recorded.folder.parent
    backup_ts = recorded.content["backup_ts"]
    committed: dict[bytes, int] = {}
    for write in json.loads((place / "writes.json").read_text())["writes"]:
        ts, key = write["commit_ts"] or 0, bytes.fromhex(write["key"])
        if write["op"] in {"put", "del"} and ts <= backup_ts:
            committed[key] = max(committed.get(key, 0), ts)
    rows = recorded.rows()
    assert {recorded.prefix + row["key"]: row["ts"] for row in rows}.items() <= committed.items()


@pytest.mark.parametrize("recorded", CASES, indirect=True)
def test_sums_of_a_part(recorded: Recorded) -> None:
    """Stores report in both files together what is counted in the joined rows."""
    for files in recorded.parts():
        rows = recorded.joined(files).combine_chunks().to_batches()[0]
        reported = sum((Checksum(file.crc64xor, file.total_kvs, file.total_bytes) for file in files), Checksum())
        assert checksum(rows["key"], rows["value"], recorded.prefix) == reported


@pytest.mark.parametrize("recorded", ["full", "full-later", "gc-fence"], indirect=True)
def test_sums_of_the_coprocessor(recorded: Recorded) -> None:
    """The checksums that stores answered at backup-ts are those of the rows."""
    rows = pa.concat_batches([batch for files in recorded.parts() for batch in recorded.joined(files).to_batches()])
    expected = Checksum()
    for path in recorded.folder.glob("checksum-response-*.pb"):
        found = tipb_pb2.ChecksumResponse.FromString(coprocessor_pb2.Response.FromString(path.read_bytes()).data)
        expected += Checksum(found.checksum, found.total_kvs, found.total_bytes)
    assert checksum(rows["key"], rows["value"], recorded.prefix) == expected


@pytest.mark.parametrize("recorded", CASES, indirect=True)
def test_records(recorded: Recorded) -> None:
    """The codec reproduces every record of the stores, and the kernel finds the same fences."""
    for files in recorded.parts():
        for batch in recorded.batches(files, "write"):
            stored = batch["value"].to_pylist()
            records = [mvcc.WriteRecord.decode(each) for each in stored]
            assert [record.encode() for record in records] == stored
            assert mvcc.fences(batch).tolist() == [record.fence or 0 for record in records]


@pytest.mark.parametrize("recorded", ["gc-fence"], indirect=True)
def test_fences(recorded: Recorded) -> None:
    """Overwritten rows have the fence that was recorded; rows that are split again have none, and the same content."""
    found = [
        int(fence)
        for files in recorded.parts()
        for batch in recorded.batches(files, "write")
        for fence in mvcc.fences(batch)
    ]
    assert set(found) == {0, recorded.content["gc_fence"]}
    for files in recorded.parts():
        rows = recorded.joined(files).combine_chunks().to_batches()[0]
        default, write = mvcc.split(rows, recorded.prefix)
        assert not mvcc.fences(write).any()
        files_of = [
            MemorySource(write_table(zip(*part.to_pydict().values(), strict=True))[0]) for part in (write, default)
        ]
        again = mvcc.join(SstReader(files_of[0]).batches(), SstReader(files_of[1]).batches(), recorded.prefix)
        assert list(again) == [rows]
