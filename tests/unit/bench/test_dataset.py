from __future__ import annotations

import zlib

import pytest

from bench.dataset import Data, Dataset, Pages
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.formats.checksum import checksum


@pytest.mark.parametrize("value_size", [0, 1, 100, 1024, 20_000])
def test_pages_are_those_of_protobuf(value_size: int) -> None:
    """Any slice of the pages is what protobuf serializes, for lengths of one to three bytes."""
    dataset = Dataset(40, value_size)
    pages, records = Pages(dataset), dataset.records()
    rows = list(zip(records["key"].to_pylist(), records["value"].to_pylist(), strict=True))
    for first, stop in ((0, 40), (7, 31), (39, 40), (5, 5)):
        answer = kvrpcpb_pb2.RawScanResponse.FromString(pages.page(first, stop))
        assert [(pair.key, pair.value) for pair in answer.kvs] == rows[first:stop]
        if value_size:  # protobuf leaves an empty value out
            assert answer.SerializeToString() == pages.page(first, stop)


def test_rows_are_found_by_their_keys() -> None:
    """A key leads to its row, and with a zero byte behind it to the next."""
    dataset = Dataset(40, 10)
    assert dataset.row_of(b"") == 0
    assert dataset.row_of(dataset.key(17)) == 17
    assert dataset.row_of(dataset.key(17) + b"\0") == 18
    assert dataset.user_bytes == checksum(dataset.records()["key"], dataset.records()["value"]).total_bytes


@pytest.mark.parametrize(("data", "least", "most"), [("half", 1.7, 2.6), ("text", 4, 20), ("noise", 0.9, 1.1)])
def test_data_shrink_as_they_should(data: Data, least: float, most: float) -> None:
    """Each kind has rows of the wanted size under the same keys, and shrinks as its name says."""
    records = Dataset(2000, 100, data).records()
    assert records["key"].equals(Dataset(2000, 100).records()["key"])
    values = b"".join(records["value"].to_pylist())
    assert len(values) == 200_000
    assert least < len(values) / len(zlib.compress(values, 1)) < most
