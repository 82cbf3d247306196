"""Servers that accept every connection and never answer: each command ends with the code of the silent one."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

import msgspec
import msgspec.structs
import pytest

from tests.integration.truth.calls import CALLS, NEEDS_STORES
from tests.integration.truth.conftest import World, check_failure
from tests.integration.truth.faults import CHECK, DRILL, PLACES
from tests.support.accepting import accepting
from tests.support.waiting import eventually
from tikv_br.backup import store as store_task
from tikv_br.cli.command import CommandPath
from tikv_br.cli.shared import ClusterFlags
from tikv_br.cluster import etcd, store
from tikv_br.cluster.config import ClusterConfig
from tikv_br.storage import cloud

pytestmark = pytest.mark.timeout(180)
"""A hanging command fails."""
SHORT = timedelta(seconds=0.03)
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
PD_CALLS = (
    "ScanRegions",
    "BatchScanRegions",
    "GetRegion",
    "GetAllStores",
    "GetStore",
    "Tso",
    "UpdateServiceGCSafePoint",
)
ASK_MORE = (("backup", "raw"), ("restore", "raw"), ("diff",), ("raw", "get"), ("raw", "scan"), ("raw", "checksum"))
"""Commands that ask PD for more than who leads."""
WRITES = {("raw", "put"), ("raw", "delete"), ("raw", "import")}
"""Commands with a write whose answer is lost: it may take effect after the command has ended."""
SLEEP = 3.0
"""Seconds that a call takes which is to be silence: much longer than any command here waits."""


def silent(*first: bytes) -> AbstractContextManager[str]:
    """An address that takes connections; on each request of HTTP it says the next of ``first``, and then nothing."""
    answers = list(first)

    def greet(connection: socket.socket) -> None:
        connection.settimeout(5)
        if answers and connection.recv(1 << 16):
            connection.sendall(answers.pop(0))

    return accepting(greet)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has commands reach clusters with shorter limits."""
    made = ClusterFlags.config

    def shorten(**limits: float) -> None:
        def config(flags: ClusterFlags) -> ClusterConfig:
            return msgspec.structs.replace(made(flags), **limits)

        monkeypatch.setattr(ClusterFlags, "config", config)

    return shorten


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 is given a fraction of a second for everything."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    for name in ("CONNECT_TIMEOUT", "FIRST_ANSWER_TIMEOUT", "REQUEST_TIMEOUT", "SILENCE_TIMEOUT"):
        monkeypatch.setattr(cloud, name, SHORT)


def using(*names: str) -> list[CommandPath]:
    """The commands that are called with any of these."""
    return [path for path, words in CALLS.items() if any(f"{{{name}}}" in words for name in names)]


def fails(world: World, command: CommandPath, code: int, what: str, *more: str, **instead: str) -> None:
    """It ends, with this code."""
    ended = world.call(command, *more, "--output", "json", **instead)
    check_failure(ended, code, f"{what}: {command}", is_json=True)


def test_pd(world: World, hurry: Callable[..., None]) -> None:
    """PD takes the connection, and that is all."""
    before = world.picture()
    hurry(connect_timeout=0.05)
    with silent() as address:
        for command in using("pd", "target"):
            code = 61 if command in {CHECK, DRILL} else 3
            fails(world, command, code, "silent PD", pd=address, target=address)
    eventually(lambda: world.picture() == before, 60)  # in this hurry a PD that is only slow is missed, too


def test_pd_that_says_who_leads_and_nothing_else(world: World, hurry: Callable[..., None]) -> None:
    """Its members answer; whatever else is asked is not answered."""
    before = world.picture()
    hurry(connect_timeout=20.0, request_timeout=0.3, retry_budget=0.1)
    for live in (world.source, world.target):
        for rpc in PD_CALLS:
            live.fail(rpc, {"delay": {"seconds": SLEEP}}, count=-1, store_id=0)
    try:
        for command in ASK_MORE:
            fails(world, command, 8, "PD falls silent", new=str(world.folder / "never-born"))
    finally:
        for live in (world.source, world.target):
            live.disarm()
    assert not list((world.folder / "never-born").rglob("backupmeta"))
    eventually(lambda: world.picture() == before, 60)


def test_stores(world: World, hurry: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store takes every request, and answers none."""
    before = world.picture()
    hurry(connect_timeout=20.0, request_timeout=0.3, retry_budget=0.2)
    for module in (store, store_task):
        monkeypatch.setattr(module, "LONG_FACTOR", 1)
    for name in world.source.store_ids:
        world.source.fail("*", {"delay": {"seconds": SLEEP}}, count=-1, store_id=name)
    try:
        for command in [path for path in NEEDS_STORES if path not in WRITES]:
            place = str(world.folder / "unborn")
            fails(world, command, 8, "silent store", target=world.source.pd, new=place)
    finally:
        world.source.disarm()
    assert not list((world.folder / "unborn").rglob("backupmeta"))
    eventually(lambda: world.picture() == before, 60)


def test_etcd(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No member says anything."""
    before = world.picture()
    with monkeypatch.context() as patch, silent() as address:
        init = functools.partialmethod(etcd.Etcd.__init__, request_timeout=0.1, retry_budget=0.1)
        patch.setattr(etcd.Etcd, "__init__", init)
        for command in using("etcd"):
            fails(world, command, 80, "silent etcd", etcd=address)
    assert world.picture() == before


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("first", [(), (NOT_FOUND,)], ids=["from the beginning", "after one answer"])
def test_storage(world: World, first: tuple[bytes, ...]) -> None:
    """S3 takes connections and never answers, or only the first request."""
    before = world.picture()
    for command in using(*PLACES):
        with silent(*first) as address:
            places = {name: f"s3://bucket/{name}" for name in PLACES}
            more = ("--s3.endpoint", f"http://{address}", "--storage-patience", "100ms")
            fails(world, command, 61 if command == CHECK else 20, "silent storage", *more, **places)
    assert world.picture() == before
