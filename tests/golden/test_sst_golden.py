"""The reader against SSTs that real stores wrote and RocksDB's own tool dumped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from tests.support.internal_rows import internal_rows
from tests.support.sst_surgery import tail_offset
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.check import check_structure
from tikv_br.formats.sst.coding import decode_varint
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.row_check import check_rows
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table

PRINTED_PROPERTIES = {
    "data blocks": names.NUM_DATA_BLOCKS,
    "entries": names.NUM_ENTRIES,
    "deletions": names.DELETED_KEYS,
    "raw key size": names.RAW_KEY_SIZE,
    "raw value size": names.RAW_VALUE_SIZE,
    "data block size": names.DATA_SIZE,
}


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in zstandard.ZstdDecompressor().stream_reader(file).read().splitlines():
            yield json.loads(line)


def _dumps(golden: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((golden / "sst").glob("*.props.json"))]


def _backups(golden: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in sorted((golden / "backups").iterdir()):
        yield folder / "data", json.loads((folder / "meta.json").read_text())


def test_rows_equal_dumps(golden: Path) -> None:
    """Keys, values, sequence numbers and types of every dumped SST equal what sst_dump printed."""
    dumps = _dumps(golden)
    index = json.loads((golden / "sst" / "index.json").read_text())
    assert sorted(dump["dump"] for dump in dumps) == sorted(f"{name}.jsonl.zst" for name in index) != []
    for dump in dumps:
        data = (golden / dump["sst"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == dump["sha256"]
        printed = [
            (bytes.fromhex(row["k"]), bytes.fromhex(row["v"]), row["seq"], row["type"])
            for row in _jsonl(golden / "sst" / dump["dump"])
        ]
        reader = SstReader(MemorySource(data))
        assert [(row.key, row.value, row.sequence, row.type) for row in internal_rows(reader)] == printed
        batches = list(reader.batches(max_rows=50))
        assert [key for batch in batches for key in batch["key"].to_pylist()] == [row[0] for row in printed]
        assert [value for batch in batches for value in batch["value"].to_pylist()] == [row[1] for row in printed]


def test_properties_equal_dumps(golden: Path) -> None:
    """Footer and table properties of every dumped SST equal what sst_dump printed."""
    for dump in _dumps(golden):
        table = Table(MemorySource((golden / dump["sst"]).read_bytes()))
        assert table.footer.checksum == dump["footer_checksum_type"]
        assert table.footer.format_version == dump["footer_format_version"]
        for printed, name in PRINTED_PROPERTIES.items():
            assert names.number(table.properties, name) == int(dump["properties"][printed]), name
        for name, value in dump["user_collected_properties"].items():
            assert table.properties[name].hex().upper() == value.removeprefix("0x"), name
        assert tail_offset(table) == decode_varint(table.properties[names.TAIL_START])[0]


def test_counts_equal_backupmeta(golden: Path) -> None:
    """Every SST of every backup passes both checks within its file's range and holds as many live rows as recorded."""
    checked = set()
    for folder, meta in _backups(golden):
        backup = meta["backupmeta"]
        version = ApiVersion(backup.get("api_version", 0))
        codec = KeyCodec(version)
        for file in backup["files"]:
            source = MemorySource((folder / file["name"]).read_bytes())
            start, end = (codec.bound(bytes.fromhex(file.get(name, ""))) for name in ("start_key", "end_key"))
            table = Table(source)
            check_structure(table, codec, start, end)
            check_rows(SstReader(source), version)
            assert table.entries == int(file["total_kvs"]), file["name"]
            checked.add(folder / file["name"])
    assert checked == set((golden / "backups").rglob("*.sst"))
