"""PD as far as clients need it to find their way: one cluster of one store, its regions known from the beginning.

For servers that answer from memory (`bench.replay`, `bench.replay_feed`): the store is at PD's own address.
"""

from __future__ import annotations

import bisect
import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from tikv_br.cluster.pb import metapb_pb2, pdpb_pb2

CLUSTER_ID, STORE_ID = 7, 1
THREADS = 8
"""That answer calls; a stream takes one."""
_TO_BYTES = {"request_deserializer": None, "response_serializer": None}
_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))

Answer = Callable[[bytes], bytes]
Stream = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
Handlers = dict[str, "grpc.RpcMethodHandler[bytes, bytes]"]


def unary(answer: Answer) -> grpc.RpcMethodHandler[bytes, bytes]:
    """A call from serialized request to serialized response."""
    return grpc.unary_unary_rpc_method_handler(lambda data, _: answer(data), **_TO_BYTES)


def streaming(answer: Stream) -> grpc.RpcMethodHandler[bytes, bytes]:
    """A call from serialized requests to serialized responses."""
    return grpc.stream_stream_rpc_method_handler(answer, **_TO_BYTES)


class CannedPd:
    """The answers of PD, from serialized requests to serialized responses."""

    def __init__(self, starts: Sequence[bytes]) -> None:
        """`starts` are the bounds at which regions begin, ascending, the first empty. Regions count from 1."""
        self._starts = starts
        self.address = self.status_address = ""

    @property
    def handlers(self) -> Handlers:
        """By method."""
        return {
            "GetMembers": unary(self._members),
            "GetClusterInfo": unary(self._cluster_info),
            "GetRegion": unary(self._region_of),
            "ScanRegions": unary(self._scan_regions),
            "GetStore": unary(self._one_store),
            "GetAllStores": unary(self._all_stores),
            "Tso": streaming(self._tso),
        }

    def _members(self, _: bytes) -> bytes:
        member = pdpb_pb2.Member(member_id=1, name="canned", client_urls=[f"http://{self.address}"])
        answer = pdpb_pb2.GetMembersResponse(header=_header(), members=[member], leader=member, etcd_leader=member)
        return answer.SerializeToString()

    def _cluster_info(self, _: bytes) -> bytes:
        return pdpb_pb2.GetClusterInfoResponse(
            header=_header(), serviceModes=[pdpb_pb2.PD_SVC_MODE]
        ).SerializeToString()

    def _region_of(self, data: bytes) -> bytes:
        key = pdpb_pb2.GetRegionRequest.FromString(data).region_key
        found = self._region(bisect.bisect_right(self._starts, key) - 1)
        return pdpb_pb2.GetRegionResponse(
            header=_header(), region=found.region, leader=found.leader
        ).SerializeToString()

    def _scan_regions(self, data: bytes) -> bytes:
        asked = pdpb_pb2.ScanRegionsRequest.FromString(data)
        first = bisect.bisect_right(self._starts, asked.start_key) - 1
        stop = bisect.bisect_left(self._starts, asked.end_key) if asked.end_key else len(self._starts)
        stop = min(stop, first + (asked.limit or stop))
        found = [self._region(number) for number in range(first, stop)]
        return pdpb_pb2.ScanRegionsResponse(header=_header(), regions=found).SerializeToString()

    def _one_store(self, _: bytes) -> bytes:
        return pdpb_pb2.GetStoreResponse(header=_header(), store=self._store()).SerializeToString()

    def _all_stores(self, _: bytes) -> bytes:
        return pdpb_pb2.GetAllStoresResponse(header=_header(), stores=[self._store()]).SerializeToString()

    def _store(self) -> metapb_pb2.Store:
        return metapb_pb2.Store(id=STORE_ID, address=self.address, status_address=self.status_address, version="8.5.2")

    def _tso(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for data in requests:
            count = pdpb_pb2.TsoRequest.FromString(data).count
            timestamp = pdpb_pb2.Timestamp(physical=1, logical=count)
            yield pdpb_pb2.TsoResponse(header=_header(), count=count, timestamp=timestamp).SerializeToString()

    def _region(self, number: int) -> pdpb_pb2.Region:
        ends = [*self._starts[1:], b""]
        peer = metapb_pb2.Peer(id=number + 1001, store_id=STORE_ID)
        meta = metapb_pb2.Region(
            id=number + 1,
            start_key=self._starts[number],
            end_key=ends[number],
            region_epoch=metapb_pb2.RegionEpoch(conf_ver=1, version=1),
            peers=[peer],
        )
        return pdpb_pb2.Region(region=meta, leader=peer)


def _header() -> pdpb_pb2.ResponseHeader:
    return pdpb_pb2.ResponseHeader(cluster_id=CLUSTER_ID)


class _Config(http.server.BaseHTTPRequestHandler):
    """The store's ``/config``."""

    def do_GET(self) -> None:
        """Answer whatever is asked."""
        self.send_response(http.HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(b'{"storage": {"api-version": 2}}')

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def serve(pd: CannedPd, services: Mapping[str, Handlers]) -> None:
    """Serve PD and a store, print the address, and go on until our input ends."""
    with ThreadPoolExecutor(THREADS) as pool, http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Config) as config:
        threading.Thread(target=config.serve_forever, daemon=True).start()
        pd.status_address = f"127.0.0.1:{config.server_port}"
        server = grpc.server(pool, options=_UNLIMITED)
        etcd: Handlers = {"Range": unary(lambda _: b"")}  # no keys
        for service, handlers in {"pdpb.PD": pd.handlers, "etcdserverpb.KV": etcd, **services}.items():
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        pd.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        print(pd.address, flush=True)
        sys.stdin.read()
        server.stop(grace=None).wait()
        config.shutdown()


@contextmanager
def serving(module: str, *arguments: object) -> Iterator[str]:
    """Run such a server as a process; yields its address, which is PD's and the store's."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip() if process.stdout else ""
            if not address:
                raise ChildProcessError(f"{module} ended with {process.wait()}")
            yield address
        finally:
            process.terminate()
