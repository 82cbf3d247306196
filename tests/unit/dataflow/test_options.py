"""Combinations that options refuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.dataflow.samples import options
from tikv_br.errors import UsageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.sst.compression import Compression


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranges": (KeyRange(b"b", b"a"),)}, "--start"),
        ({"ranges": (KeyRange(b"", b"a"), KeyRange(b"b", b"b"))}, "--start"),
        ({"ranges": (KeyRange(b"c", b""), KeyRange(b"a", b"d"))}, "the ranges a:d and c: overlap"),
        ({"ranges": (KeyRange(b"c", b"d"), KeyRange(b"", b""))}, "overlap"),
        ({"compression": Compression.NONE, "compression_level": 1}, "1 is not a level of none"),
        ({"compression": Compression.ZSTD, "compression_level": 23}, "23 is not a level of zstd"),
        ({"file_bytes": 0}, "--file-size"),
        ({"safe_interval": -1.0}, "--safe-interval"),
        ({"gc_ttl": -1}, "--gc-ttl"),
        ({"spark_master": "yarn2"}, "yarn2"),
        ({"spark_master": "yarn2", "executor": "spark"}, "yarn2"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    """Each names the flag."""
    with pytest.raises(UsageError, match=message):
        options(**changes).check()


def test_sound_options_pass() -> None:
    """The defaults, an open range, and a master that does not matter because the driver does the work."""
    options().check()
    options(ranges=(KeyRange(b"b", b""), KeyRange(b"a", b"b"))).check()
    options(executor="driver", spark_master="nowhere").check()
    options(compression=Compression.ZSTD, compression_level=-5).check()
