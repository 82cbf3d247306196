"""Hostile tables: thousands of damaged ones, of which none may do worse than raise a `FormatError`.

``python -m tests.unit.formats_sst.fuzz --inputs N [--seed S]`` runs longer than the test does and prints a tally. Tables
without checksums let damage through to every parser; `limit_memory` makes a huge allocation fail instead of passing
unnoticed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import random
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from formats.api_version import ApiVersion
from formats.errors import FormatError
from formats.keys import DATA_PREFIX, KeyCodec
from formats.sst import Compression, MemorySource, SstOptions, SstReader, check_rows, check_structure
from formats.sst.block_checksum import ChecksumType
from formats.sst.coding import encode_varint
from formats.sst.footer import FOOTER_SIZE
from tests.unit.formats_sst.tables import Row, hand_made, storage_rows, table_options, write, write_by_rocksdb

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


def outcomes(originals: list[bytes], seed: int, count: int) -> Iterator[str]:
    """What became of each damaged table: ``read`` or the name of the error. Anything but a `FormatError` comes out."""
    random_ = random.Random(seed)
    for _ in range(count):
        source = MemorySource(damaged(random_, random_.choice(originals)))
        try:
            check_structure(source, ApiVersion.V2)
            check_rows(SstReader(source), ApiVersion.V2)
            yield "read"
        except FormatError as error:
            yield type(error).__name__
            with contextlib.suppress(FormatError):
                collections.deque(SstReader(source).internal_rows(), maxlen=0)


def limit_memory(size: int) -> tuple[int, int]:
    """Let the process map at most `size` bytes more than it has; the limits before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + size, before[1]))
    return before


def main() -> None:
    """Run as many inputs as asked and print how they ended, and how fast."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        originals = tables(Path(folder))
    list(outcomes(originals, arguments.seed - 1, 200))
    limit_memory(1 << 30)
    began = time.monotonic()
    tally = collections.Counter(outcomes(originals, arguments.seed, arguments.inputs))
    seconds = time.monotonic() - began
    sys.stdout.write(f"{arguments.inputs} inputs, seed {arguments.seed}, {seconds:.0f} s: {dict(tally)}\n")


if __name__ == "__main__":
    main()
