"""Hostile tables: thousands of damaged ones, of which none may do worse than raise a `FormatError`.

Tables without checksums let damage through to every parser.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import struct
from pathlib import Path

from tests.fuzzing.target import Target
from tests.support.internal_rows import internal_rows
from tests.unit.formats.sst.tables import Row, hand_made, storage_rows, table_options, write, write_by_rocksdb
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.sst.block import FOOTER_SIZE, ChecksumType
from tikv_br.formats.sst.check import check_structure
from tikv_br.formats.sst.coding import encode_varint
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.row_check import check_rows
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table
from tikv_br.formats.sst.writer import SstOptions

LARGEST = 64 << 10
"""Of the recorded tables those up to this size are damaged: most of a larger one's bytes are rows like others."""
TELLING_BYTES = (0, 1, 7, 0x7F, 0x80, 0xFF)
TELLING_PIECES = (
    b"",
    b"\xff\xff\xff\xff\x0f",
    b"\xff" * 9 + b"\x01",
    b"\x80" * 11,
    struct.pack("<I", 2**31),
    struct.pack("<I", 2**32 - 1),
    struct.pack("<Q", 2**63),
    encode_varint(256 << 20),
    encode_varint(1 << 40),
)


def rows() -> list[Row]:
    """Rows of a V2 store, one of them large, one with a long key."""
    small = storage_rows(ApiVersion.V2, 60)
    small[30] = (small[30][0], bytes(9000))
    return [*small, (DATA_PREFIX + KeyCodec(ApiVersion.V2).storage_key(b"r\0\0\0z" + b"k" * 500, 5), b"\0")]


def tables(folder: Path) -> list[bytes]:
    """Tables of every format version and compression; most without checksums, so that damage reaches the parsers."""
    found = [hand_made([rows()[:30], rows()[30:]], checksum=ChecksumType.NONE)]
    found += [
        write(rows(), SstOptions(method, format_version=2 + at, block_size=1024))[0]
        for at, method in enumerate(Compression)
    ]
    shapes = itertools.product(range(2, 7), ("none", "zlib", "lz4", "zstd", "snappy", "bz2"), (False, True))
    for number, (version, compression, two_level) in enumerate(shapes):
        options = table_options(
            format_version=version, compression=compression, two_level=two_level, block_size=600,
            checksum="no_checksum", hash_index=number % 3 == 0, index_restart_interval=1 + number % 4,
        )  # fmt: skip
        found.append(write_by_rocksdb(folder / f"{number}.sst", rows(), options))
    return found


def damaged(random_: random.Random, data: bytes) -> bytes:
    """The table with up to five changes, half of them in its tail, where the structure is."""
    out = bytearray(data)
    for _ in range(random_.randint(1, 5)):
        if not out:
            break
        at = _place(random_, len(out))
        match random_.randrange(12):
            case 0 | 1 | 2 | 3:
                out[at] ^= 1 << random_.randrange(8)
            case 4 | 5 | 6:
                out[at] = random_.choice(TELLING_BYTES)
            case 7 | 8:
                piece = random_.choice(TELLING_PIECES)
                out[at : at + len(piece)] = piece
            case 9:
                del out[at : at + random_.randint(1, 64)]
            case 10:
                out[at:at] = random_.choice(TELLING_PIECES)
            case _:
                _cut(random_, out)
    return bytes(out)


def _place(random_: random.Random, size: int) -> int:
    zone = random_.choice((size, size, min(size, 1500), min(size, FOOTER_SIZE)))
    return size - 1 - random_.randrange(zone)


def _cut(random_: random.Random, out: bytearray) -> None:
    """Take out the middle but keep the footer, or cut the end."""
    if random_.random() < 0.5:
        del out[random_.randrange(len(out)) :]
    else:
        at = random_.randrange(max(1, len(out) - FOOTER_SIZE))
        del out[at : max(at, len(out) - FOOTER_SIZE - random_.randrange(200))]


def read(data: bytes) -> str:
    """Check and read it: ``read`` or the name of the error. Anything but a `FormatError` comes out."""
    source = MemorySource(data)
    try:
        check_structure(Table(source), KeyCodec(ApiVersion.V2))
        check_rows(SstReader(source), ApiVersion.V2)
    except FormatError as error:
        with contextlib.suppress(FormatError):
            collections.deque(internal_rows(SstReader(source)), maxlen=0)
        return type(error).__name__
    return "read"


def recorded(golden: Path) -> list[bytes]:
    """The tables of real stores."""
    return [path.read_bytes() for path in sorted(golden.rglob("*.sst")) if path.stat().st_size <= LARGEST]


SST = Target(tables, recorded, damaged, read)
