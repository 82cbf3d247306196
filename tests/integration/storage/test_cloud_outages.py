"""Azure and Google Cloud Storage that go away and come back, or do not; what all clouds share is tested on S3 in `test_s3_failures`."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.cloud_servers import CONTAINER, AzureServer, azurite_server
from tests.integration.gcs_server import GcsServer, gcs_server
from tests.integration.storage_suite import stream
from tests.support.ports import reserved_ports
from tests.support.waiting import PATIENCE, eventually
from tikv_br.errors import StorageUnreachable
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.cloud import PART_SIZE
from tikv_br.storage.open import open_store
from tikv_br.storage.outage import health_of
from tikv_br.storage.url import StorageLocation

pytestmark = pytest.mark.slow
Server = AzureServer | GcsServer


@dataclass(frozen=True)
class Cloud:
    """A server that can be started again with what it has stored, at the same address."""

    kind: str
    folder: Path
    port: int

    def start(self) -> AbstractContextManager[Server]:
        """Run it for the length of the block, and then kill it."""
        if self.kind == "azure":
            return azurite_server(self.folder, port=self.port)
        return gcs_server(self.folder, port=self.port, on_disk=True)


@pytest.fixture(params=["azure", "gcs"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    """One cloud after the other."""
    with reserved_ports(1) as [port]:
        yield Cloud(request.param, tmp_path, port)


def patient(location: StorageLocation, seconds: float) -> StorageLocation:
    """The location, with outages of so many seconds ridden out."""
    return dataclasses.replace(location, s3=structs.replace(location.s3, patience=seconds))


def has_begun(server: Server) -> bool:
    """Whether a part of an upload has arrived."""
    if isinstance(server, GcsServer):
        return any(server.uploads.values())
    query = "restype=container&comp=list&include=uncommittedblobs&prefix=p/large"
    return b"<Name>p/large</Name>" in server.request("GET", CONTAINER, query)[1]


def calls(store: ObjectStore) -> dict[str, Callable[[], object]]:
    """Every kind of request, none of which disturbs another one."""
    return {
        "get": lambda: store.get("object"),
        "get_range": lambda: store.get_range("object", 0, 1),
        "stat": lambda: store.stat("object").name,
        "list": lambda: [info.name for info in store.list("listed")],
        "put": lambda: store.put("new", b"x").name,
        "put_if_absent": lambda: store.put_if_absent("once", b"x").name,
        "delete": lambda: store.delete("deleted"),
        "writer": lambda: stream(store, "streamed", 1, 10),
    }


def test_a_restart_fails_no_request(cloud: Cloud) -> None:
    """All requests wait while nobody listens, an upload that has sent parts goes on, and each has done its work afterwards."""
    data = random.Random(1).randbytes(3 * PART_SIZE)
    with cloud.start() as server:
        location = patient(server.location("p"), PATIENCE)
        store = open_store(location)
        for name in ("object", "listed/1", "deleted"):
            store.put(name, b"x")
        writer = store.open_writer("large")
        writer.write(data[: 2 * PART_SIZE])
        # obstore does not repeat the request that begins an upload to Google if its answer is lost: tasks do.
        eventually(lambda: has_begun(server))
    results: dict[str, object] = {}

    def finish(name: str, call: Callable[[], object]) -> None:
        results[name] = call()

    def upload() -> int:
        with writer:
            writer.write(data[2 * PART_SIZE :])
            return writer.close().size

    work = {**calls(store), "upload": upload}
    threads = [threading.Thread(target=finish, args=each) for each in work.items()]
    for thread in threads:
        thread.start()
    # That one of them has asked in vain: the record of the outage is shared.
    eventually(lambda: health_of(location.health_key).away_seconds > 1)
    assert results == {}
    with cloud.start():
        for thread in threads:
            thread.join(PATIENCE)
        assert results == {
            "get": b"x",
            "get_range": b"x",
            "stat": "object",
            "list": ["listed/1"],
            "put": "new",
            "put_if_absent": "once",
            "delete": None,
            "writer": None,
            "upload": len(data),
        }
        assert {info.name for info in store.list()} == {"object", "listed/1", "new", "once", "streamed", "large"}
        assert store.get("large") == data


def test_a_server_that_stays_away(cloud: Cloud) -> None:
    """The first request fails after the patience, with endpoint, cause and duration; later ones do not wait again."""
    with cloud.start() as server:
        store = open_store(patient(server.location("p"), 3))
        store.put("object", b"x")
    said = f"{server.endpoint} does not answer: connection refused; gave up after"
    for call in calls(store).values():
        with pytest.raises(StorageUnreachable, match=said) as caught:
            call()
        assert caught.value.exit_code == StorageUnreachable.exit_code
