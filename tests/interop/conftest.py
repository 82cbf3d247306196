"""Playgrounds that the tests of a module share, and clients of them that share no code with us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.interop.line_client import LineClient, TxnLineClient
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.tools import find_tool
from tikv_br.formats.api_version import ApiVersion

Clusters = Callable[..., LiveCluster]
Connect = Callable[[LiveCluster], LineClient]
ConnectTxn = Callable[[LiveCluster], TxnLineClient]
BUILD = "run scripts/install_client_go.sh, or set CLIENT_GO"


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Return a function to a playground of three stores, one for each API version and name, started when first asked for."""
    running: dict[tuple[ApiVersion, str], LiveCluster] = {}
    with ExitStack() as stack:

        def get(version: ApiVersion, name: str = "source") -> LiveCluster:
            if (version, name) not in running:
                folder = tmp_path_factory.mktemp(f"{version.label}-{name}")
                running[version, name] = stack.enter_context(live_cluster(folder, version, stores=3))
            return running[version, name]

        yield get


@pytest.fixture(scope="module")
def client_go() -> Iterator[Connect]:
    """Return a function from a playground to client-go connected to it, one program for each."""
    program = find_tool("client_go", hint=BUILD, variable="CLIENT_GO")
    running: dict[str, LineClient] = {}
    with ExitStack() as stack:

        def connect(live: LiveCluster) -> LineClient:
            if live.pd not in running:
                mode = "v2" if live.raw().codec.is_v2 else "v1"
                running[live.pd] = stack.enter_context(LineClient([program, live.pd, mode]))
            return running[live.pd]

        yield connect


@pytest.fixture(scope="module")
def client_go_txn() -> Iterator[ConnectTxn]:
    """Return a function that starts another client-go for transactions of a playground; in V2 of the keyspace DEFAULT."""
    program = find_tool("client_go", hint=BUILD, variable="CLIENT_GO")
    with ExitStack() as stack:

        def connect(live: LiveCluster) -> TxnLineClient:
            keyspace = ["DEFAULT"] if live.raw().codec.is_v2 else []
            return stack.enter_context(TxnLineClient([program, live.pd, "txn", *keyspace]))

        yield connect
