"""The admin API of a playground (``/playground/*`` on PD's port) for tests: failpoints, fatal_requests, regions, stores."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from typing import Any, TypeAlias

Json: TypeAlias = Any


class AdminRefused(AssertionError):
    """The playground did not do what a test asked for."""


class PlaygroundAdmin:
    """Steers the playground whose PD listens at ``address``: host:port, of several members with commas between; with TLS if there is a context."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        self._members = address.split(",")
        self._tls = tls

    def get(self, path: str) -> Json:
        """GET of a path below ``/playground/``, or with a leading slash of any on PD's port."""
        return self._call("GET", path)

    def run(self, command: str, **arguments: Json) -> Json:
        """Run a command (see `tikv_br.playground.admin`) and return its result."""
        return self._call("POST", command, arguments)

    def create_keyspace(self, name: str) -> int:
        """Create a keyspace, or find it, as an operator does; its id."""
        listed = self.get("/pd/api/v2/keyspaces")["keyspaces"]
        found = next((int(each["id"]) for each in listed if each["name"] == name), None)
        return int(self._call("POST", "/pd/api/v2/keyspaces", {"name": name})["id"]) if found is None else found

    def split(self, *bounds: bytes) -> Json:
        """Split wherever the physical keys ``bounds`` lie."""
        return self.run("split", keys=[bound.hex() for bound in bounds])

    def regions(self) -> list[Json]:
        """All regions in key order."""
        return list(self.get("regions"))

    def safe_points(self) -> dict[str, int]:
        """What PD holds for services, by name, but for GC's own."""
        points = self.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
        return {point["service_id"]: point["safe_point"] for point in points if point["service_id"] != "gc_worker"}

    def fail(self, rpc: str, action: Json, **limits: float) -> int:
        """Arm a failpoint (see `tikv_br.playground.failpoints`) and return its id."""
        return int(self._call("POST", "failpoints", {"rpc": rpc, "action": action, **limits})["id"])

    def relent(self, failpoint: int) -> None:
        """Remove a failpoint."""
        self._call("DELETE", f"failpoints/{failpoint}")

    @contextlib.contextmanager
    def failing(self, rpc: str, action: Json, **limits: float) -> Iterator[int]:
        """A failpoint for the length of the block; fails when it never struck."""
        failpoint = self.fail(rpc, action, **limits)
        try:
            yield failpoint
            assert self.hits(failpoint) > 0, f"no {rpc} ever met the failpoint"
        finally:
            self.relent(failpoint)

    def hits(self, failpoint: int) -> int:
        """Number of hits of a failpoint."""
        return next(int(each["hits"]) for each in self.get("failpoints") if each["id"] == failpoint)

    def calls(self) -> Json:
        """Time for which stores had running calls: see `tikv_br.playground.node.CallClock`."""
        return self.get("calls")

    def forget_calls(self) -> None:
        """Reset the count of calls."""
        self._call("DELETE", "calls")

    def disarm(self) -> None:
        """Remove all failpoints."""
        self._call("DELETE", "failpoints")

    def fatal_requests(self) -> list[Json]:
        """Requests that would have killed a real store."""
        return list(self.get("fatal_requests"))

    def pardon(self) -> None:
        """Forget the fatal_requests: the test committed them on purpose."""
        self._call("DELETE", "fatal_requests")

    def assert_innocent(self) -> None:
        """Fail when there is a fatal_request."""
        assert self.fatal_requests() == []

    def _call(self, method: str, path: str, body: Json = None) -> Json:
        full = path if path.startswith("/") else f"/playground/{path}"
        payload = None if body is None else json.dumps(body)
        for left in reversed(range(len(self._members))):
            address = self._members[0]
            connection = (
                http.client.HTTPSConnection(address, timeout=60, context=self._tls)
                if self._tls
                else http.client.HTTPConnection(address, timeout=60)
            )
            try:
                with contextlib.closing(connection):
                    connection.request(method, full, payload)
                    answer = connection.getresponse()
                    data = answer.read()
                break
            except ConnectionError:  # a member that a test has killed
                if not left:
                    raise
                self._members.append(self._members.pop(0))
        if answer.status != http.client.OK:
            raise AdminRefused(f"{method} {path}: {answer.status} {data.decode()}")
        return json.loads(data)
