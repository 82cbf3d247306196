"""A PD of its own process that knows a great many regions: ``python -m tests.integration.scale.pd_with_regions COUNT``.

It prints ``GRPC_ADDRESS HTTP_ADDRESS`` and serves until its input ends.
"""

from __future__ import annotations

import bisect
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote_to_bytes

from tests.support.scripted_grpc import ScriptedServer
from tests.unit.cluster.fakes import PD, members, region, with_leader
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec

STORES = (1, 2, 3)
REGION_MIB = 96


def bounds(count: int) -> list[bytes]:
    """The bounds of so many regions of an API V2 cluster, the empty ones at both ends included."""
    codec = KeyCodec(ApiVersion.V2)
    inner = [codec.bound(codec.rpc_key(b"user:%012d:profile" % number)) for number in range(1, count)]
    return [b"", *inner, b""]


def main(count: int) -> None:
    """Serve."""
    ends = bounds(count)
    with ScriptedServer() as grpc, ThreadingHTTPServer(("127.0.0.1", 0), handler(ends)) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()

        def scan(data: bytes) -> pdpb_pb2.ScanRegionsResponse:
            request = pdpb_pb2.ScanRegionsRequest.FromString(data)
            page = range(*found(ends, request.start_key, request.limit))
            regions = [
                with_leader(region(number + 10, ends[number], ends[number + 1], STORES), STORES[number % 3])
                for number in page
            ]
            return pdpb_pb2.ScanRegionsResponse(regions=regions)

        grpc.script(PD + "GetMembers", members(grpc.address))
        grpc.script(PD + "ScanRegions", scan)
        print(grpc.address, f"127.0.0.1:{http.server_port}", flush=True)  # noqa: T201 - for the test that started it
        sys.stdin.read()
        http.shutdown()


def found(ends: list[bytes], start: bytes, limit: int) -> tuple[int, int]:
    """First and last (exclusive) number of the regions of a page."""
    first = bisect.bisect_right(ends, start, 0, len(ends) - 1) - 1
    return first, min(first + limit, len(ends) - 1)


def handler(ends: list[bytes]) -> type[BaseHTTPRequestHandler]:
    """PD's ``/regions/key`` without ``end_key``, as PD before 6.0."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = re.fullmatch(r"/pd/api/v1/regions/key\?key=([^&]*)&end_key=[^&]*&limit=(\d+)", self.path)
            assert asked is not None, self.path
            body = document(ends, range(*found(ends, unquote_to_bytes(asked[1]), int(asked[2]))))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Say nothing."""

    return Handler


def document(ends: list[bytes], page: range) -> bytes:
    """PD's HTTP document of these regions, with all the fields of PD 8.5.2."""
    regions = [
        {
            "id": number + 10,
            "start_key": ends[number].hex().upper(),
            "end_key": ends[number + 1].hex().upper(),
            "epoch": {"conf_ver": 5, "version": number + 7},
            "peers": [{"role_name": "Voter", "id": number * 10 + store, "store_id": store} for store in STORES],
            "leader": {"role_name": "Voter", "id": number * 10 + 1, "store_id": 1},
            "cpu_usage": 0,
            "written_bytes": 39,
            "read_bytes": 0,
            "written_keys": 1,
            "read_keys": 0,
            "approximate_size": REGION_MIB,
            "approximate_keys": 960_000,
        }
        for number in page
    ]
    return json.dumps({"count": len(regions), "regions": regions}).encode()


if __name__ == "__main__":
    main(int(sys.argv[1]))
