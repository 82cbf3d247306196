"""A PD of its own process that knows a great many regions: ``python -m tests.integration.scale.pd_with_regions COUNT``.

It prints ``GRPC_ADDRESS HTTP_ADDRESS`` and serves until its input ends. Answers are made beforehand, so that what is
measured is the client.
"""

from __future__ import annotations

import bisect
import json
import sys

from formats.api_version import ApiVersion
from formats.keys.codec import KeyCodec
from tests.support.scripted_grpc import ScriptedServer
from tests.unit.cluster.fakes import PD, members, region, with_leader
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br.cluster.pb import pdpb_pb2

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
    with ScriptedServer() as grpc, ScriptedHttp() as http:
        regions = [
            with_leader(region(number + 10, ends[number], ends[number + 1], STORES), STORES[number % 3])
            for number in range(count)
        ]

        def scan(data: bytes) -> pdpb_pb2.ScanRegionsResponse:
            request = pdpb_pb2.ScanRegionsRequest.FromString(data)
            first = bisect.bisect_right(ends, request.start_key, 0, count) - 1
            return pdpb_pb2.ScanRegionsResponse(regions=regions[first : first + request.limit])

        grpc.script(PD + "GetMembers", members(grpc.address))
        grpc.script(PD + "ScanRegions", scan)
        http.scripts["/pd/api/v1/regions"] = [(200, document(ends))]
        print(grpc.address, http.address, flush=True)  # noqa: T201 - for the test that started it
        sys.stdin.read()


def document(ends: list[bytes]) -> bytes:
    """What PD's HTTP lists, with all the fields of PD 8.5.2."""
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
        for number in range(len(ends) - 1)
    ]
    return json.dumps({"count": len(regions), "regions": regions}).encode()


if __name__ == "__main__":
    main(int(sys.argv[1]))
