"""A cluster of its own process that answers scans from memory: ``python -m bench.replay ROWS VALUE_SIZE REGIONS DATA DELAY``.

PD and one store of API V1, as much of them as a scan by us or by client-go needs. Pages are slices of serialized pairs
(`bench.dataset`), so that the server costs little more than gRPC itself. A scan is answered after DELAY seconds, as by a store that is far away. It prints its address and serves until its
input ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import cast

import grpc

from bench.canned_pd import CannedPd, serve, serving, streaming, unary
from bench.dataset import Data, Dataset, Pages
from tikv_br.cluster.pb import kvrpcpb_pb2, tikvpb_pb2
from tikv_br.formats.sst.coding import encode_varint

_RAW_SCAN = tikvpb_pb2.BatchCommandsResponse.Response.DESCRIPTOR.fields_by_name["RawScan"].number


def replaying(dataset: Dataset, regions: int = 8, delay: float = 0.0) -> AbstractContextManager[str]:
    """Start the server; yields its address, which is PD's and the store's."""
    return serving("bench.replay", dataset.rows, dataset.value_size, regions, dataset.data, delay)


class _Scans:
    """The store's answers, from serialized requests to serialized responses."""

    def __init__(self, dataset: Dataset, starts: list[bytes], delay: float) -> None:
        self._dataset = dataset
        self._delay = delay
        self._pages = Pages(dataset)
        self._starts = starts

    def raw_scan(self, data: bytes) -> bytes:
        time.sleep(self._delay)
        return self._page(kvrpcpb_pb2.RawScanRequest.FromString(data))

    def batch_commands(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        """Client-go sends its scans in here; anything else comes back empty."""
        for data in requests:
            batch = tikvpb_pb2.BatchCommandsRequest.FromString(data)
            answers = [self._command(request) for request in batch.requests]
            ids = tikvpb_pb2.BatchCommandsResponse(request_ids=batch.request_ids).SerializeToString()
            yield b"".join([*(_message(1, answer) for answer in answers), ids])

    def _command(self, request: tikvpb_pb2.BatchCommandsRequest.Request) -> bytes:
        return _message(_RAW_SCAN, self._page(request.RawScan)) if request.HasField("RawScan") else b""

    def _page(self, asked: kvrpcpb_pb2.RawScanRequest) -> bytes:
        first = self._dataset.row_of(asked.start_key)
        stop = self._dataset.row_of(asked.end_key) if asked.end_key else self._dataset.rows
        region_end = asked.context.region_id  # regions count from 1: the id is the number of the next
        if region_end < len(self._starts):
            stop = min(stop, self._dataset.row_of(self._starts[region_end]))
        return self._pages.page(first, min(stop, first + asked.limit))


def _message(field: int, data: bytes) -> bytes:
    """A message as a field of another."""
    return encode_varint(field << 3 | 2) + encode_varint(len(data)) + data


def main(rows: int, value_size: int, regions: int, data: Data, delay: float) -> None:
    """Serve."""
    dataset = Dataset(rows, value_size, data)
    starts = [b"", *(dataset.key(rows * number // regions) for number in range(1, regions))]
    scans = _Scans(dataset, starts, delay)
    store = {"RawScan": unary(scans.raw_scan), "BatchCommands": streaming(scans.batch_commands)}
    serve(CannedPd(starts), {"tikvpb.Tikv": store})


if __name__ == "__main__":
    rows_, size_, regions_, data_, delay_ = sys.argv[1:]
    main(int(rows_), int(size_), int(regions_), cast("Data", data_), float(delay_))
