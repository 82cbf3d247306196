"""No input may crash the process, hang, or make it allocate what it cannot: a bounded run of the fuzzer."""

from __future__ import annotations

import collections
import resource

import pytest

from tests.fuzzing.tables import SST, tables
from tests.fuzzing.target import limit_memory, outcomes
from tikv_br.formats.errors import FormatError
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Tables to damage, each of which is sound."""
    return tables(tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize("seed", range(6))
def test_damaged_tables(originals: list[bytes], seed: int) -> None:
    """Thousands of damaged tables are read, or refused by a FormatError; nothing else, within 1 GiB of memory."""
    collections.Counter(outcomes(SST, originals, -1, 30))
    before = limit_memory(1 << 30)
    try:
        tally = collections.Counter(outcomes(SST, originals, seed, 1500))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert tally["DamagedBytes"] > 500
    assert tally["UnsupportedFormat"] > 20
    assert tally["read"] > 5


def test_truncations(originals: list[bytes]) -> None:
    """A table that was cut anywhere is refused."""
    for data in originals[:5]:
        for size in range(0, len(data), 37):
            with pytest.raises(FormatError):
                list(SstReader(MemorySource(data[:size])).batches())
