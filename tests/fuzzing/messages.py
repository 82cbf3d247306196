"""Hostile messages of servers: pages of RawScan and change events, as damaged as they come.

What a kernel takes must be what protobuf reads, what it leaves goes to protobuf, and what protobuf refuses is an error of
ours. Kernels get each message at the very end of a page of memory behind which nothing may be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from msgspec.structs import replace

from tests.fuzzing.tables import TELLING_PIECES
from tests.fuzzing.target import Target
from tests.unit.formats import by_protobuf
from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.scan import measure_with_protobuf
from tikv_br.errors import TikvBrError
from tikv_br.formats import cdc, rawscan
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import checksum
from tikv_br.formats.errors import UnsortedKeys
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.rawscan import RawPage, ScanPage
from tikv_br.formats.rows import from_storage
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.writer import SstOptions, SstWriter
from tikv_br.incremental.feed.feed import decode

CODEC = KeyCodec(ApiVersion.V2)
V1 = KeyCodec(ApiVersion.V1)
SMALL_BLOCKS = SstOptions(block_size=1 << 10)
WHOLE = CODEC.rpc_range()
LARGEST = 64 << 10
"""Of the recorded messages those up to this size are damaged."""
TELLING_BYTES = bytes.fromhex("0008 0a10 1218 1a20 2a30 3238 4001 0204 057f 80ff")
_PAGE = mmap.PAGESIZE


class Guarded:
    """Memory that ends where no process may read."""

    def __init__(self, size: int) -> None:
        """Room for messages up to `size`."""
        pages = -(-size // _PAGE)
        self._memory = mmap.mmap(-1, (pages + 1) * _PAGE)
        self._end = pages * _PAGE
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address + self._end), ctypes.c_size_t(_PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def hold(self, data: bytes) -> bytes:
        """The bytes, so that one more would be beyond the end; until the next call. Not `bytes` but as good as that."""
        start = self._end - len(data)
        self._memory[start : self._end] = data
        return memoryview(self._memory)[start : self._end]  # type: ignore[return-value]


_guarded = Guarded(4 * LARGEST)


def damaged(random_: random.Random, data: bytes) -> bytes:
    """The message with up to four changes."""
    out = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(out) + 1)
        match random_.randrange(12):
            case 0 | 1 | 2 | 3 if at < len(out):
                out[at] ^= 1 << random_.randrange(8)
            case 4 | 5 | 6 if at < len(out):
                out[at] = random_.choice(TELLING_BYTES)
            case 7:
                out[at:at] = random_.choice(TELLING_PIECES)
            case 8:
                del out[at : at + random_.randint(1, 64)]
            case 9 | 10:
                since = random_.randrange(len(out) + 1)
                out[at:at] = out[since : since + random_.randint(1, 64)]
            case _:
                del out[at:]
    return bytes(out)


def read_page(data: bytes) -> str:
    """As a scan reads it, beside protobuf: into columns, and into a table."""
    raw = rawscan.measure(_guarded.hold(data))
    if raw is None:
        return _left(lambda: measure_with_protobuf(data))
    page = raw.split()
    taken = list(zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True))
    if taken != by_protobuf.pairs(data):
        raise AssertionError("the kernel reads another page than protobuf")
    with contextlib.suppress(UnsortedKeys):
        _check_table(replace(raw, first_key=bytes(raw.first_key)), page)
    return "by the kernel"


def _check_table(raw: RawPage, page: ScanPage) -> None:
    """Make a table of the page, in blocks so small that there are several, and read it."""
    pieces: list[bytes] = []
    writer = SstWriter(pieces.append, SMALL_BLOCKS)
    if writer.append_page(raw, V1, CODEC).checksum() != checksum(page.keys, page.values):
        raise AssertionError("a table has other rows than the page")
    if raw.rows:
        writer.finish()
        rows = (
            pa.Table.from_batches(SstReader(MemorySource(b"".join(pieces))).batches()).combine_chunks().to_batches()[0]
        )
        records = from_storage(rows, CODEC)
        if not (records["key"].equals(page.keys) and records["value"].equals(page.values)):
            raise AssertionError("a table reads otherwise than the page")


def read_event(data: bytes) -> str:
    """As a feed reads it, beside protobuf."""
    event = cdc.parse(_guarded.hold(data))
    if event is None:
        return _left(lambda: decode(data).changes.records(CODEC, WHOLE))
    if by_protobuf.taken(event, CODEC) != by_protobuf.inside(by_protobuf.changes(data), WHOLE):
        raise AssertionError("the kernel reads another event than protobuf")
    return "by the kernel"


def _left(read: object) -> str:
    """What becomes of a message that is left to protobuf."""
    try:
        read()  # type: ignore[operator]
    except (TikvBrError, RegionErrorSeen) as error:
        return type(error).__name__
    return "by protobuf"


def _pages(_: Path) -> list[bytes]:
    pairs = [(b"r\0\0\0k%03d" % at, b"v" * (at * at % 300)) for at in range(40)]
    kvs = [kvrpcpb_pb2.KvPair(key=key, value=value) for key, value in pairs]
    long = [kvrpcpb_pb2.KvPair(key=b"k" * 200, value=bytes(9000)), kvrpcpb_pb2.KvPair()]
    failed = kvrpcpb_pb2.KvPair(error=kvrpcpb_pb2.KeyError(abort="no"))
    answers = [
        kvrpcpb_pb2.RawScanResponse(kvs=found) for found in (kvs, kvs[:1], kvs[:3], long, [failed], [*kvs, failed])
    ]
    moved = errorpb_pb2.Error(message="moved", not_leader=errorpb_pb2.NotLeader(region_id=1))
    answers.append(kvrpcpb_pb2.RawScanResponse(region_error=moved))
    return [answer.SerializeToString() for answer in answers]


def _events(_: Path) -> list[bytes]:
    log, put, delete = cdcpb_pb2.Event.LogType, cdcpb_pb2.Event.Row.PUT, cdcpb_pb2.Event.Row.DELETE
    message = cdcpb_pb2.ChangeDataEvent()
    for region in range(1, 5):
        event = message.events.add(region_id=region, request_id=300)
        for at in range(12):
            row = event.entries.entries.add(start_ts=at << 40, commit_ts=(at + 1) << 40, type=log.COMMITTED)
            row.op_type, row.key, row.value = delete if at % 5 == 4 else put, b"r\0\0\0k%d" % at, b"v" * at * 20
            row.expire_ts_unix_secs = at % 3 * (1 << 31)
        event.entries.entries.add(type=log.INITIALIZED)
    resolved = cdcpb_pb2.ResolvedTs(regions=[1, 2, 300, 1 << 60], ts=7 << 50, request_id=300)
    error = cdcpb_pb2.Event(region_id=1, error=cdcpb_pb2.Error(not_leader=errorpb_pb2.NotLeader(region_id=1)))
    both = cdcpb_pb2.ChangeDataEvent(events=[*message.events[:1], error], resolved_ts=resolved)
    only = cdcpb_pb2.ChangeDataEvent(resolved_ts=resolved)
    old = cdcpb_pb2.ChangeDataEvent(events=[cdcpb_pb2.Event(region_id=1, resolved_ts=1 << 50)])
    return [each.SerializeToString() for each in (message, both, only, old)]


def _recorded_pages(golden: Path) -> list[bytes]:
    def answers() -> Iterator[bytes]:
        for index in sorted(golden.glob("wire/*/index.json")):
            for entry in json.loads(index.read_text(encoding="utf-8"))["entries"]:
                if entry["rpc"] == "RawScan":
                    yield from ((index.parent / name).read_bytes() for name in entry["response_files"])

    return [data for data in answers() if len(data) <= LARGEST]


def _recorded_events(golden: Path) -> list[bytes]:
    def frames() -> Iterator[bytes]:
        for path in sorted(golden.glob("cdc/*/frames.bin")):
            data, at = path.read_bytes(), 0
            while at < len(data):
                start = at + 4
                at = start + int.from_bytes(data[at:start], "big")
                yield data[start:at]

    return list({data: None for data in frames() if len(data) <= LARGEST})


PAGE = Target(_pages, _recorded_pages, damaged, read_page)
CDC = Target(_events, _recorded_events, damaged, read_event)
