"""tikv-client, the Rust client of the TiKV project, and we understand each other: API V1, and V2 with its keyspaces by name.

Its build takes minutes, so it is asked for: ``TIKV_BR_TEST_RUST_CLIENT=1 scripts/test.sh interop``.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Clusters
from tests.interop.line_client import LineClient
from tests.interop.rows import BOUNDS, our_rows, rows, split, with_ttls
from tests.support.live_cluster import LiveCluster
from tests.support.raw_calls import CompareAndSwapResult, compare_and_swap
from tests.support.tools import find_tool
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

V1, V2 = ApiVersion.V1, ApiVersion.V2
KEYSPACES = ("DEFAULT", "one", "two")
TOLERANCE = 60
LAST = BOUNDS[-1]
"""Start of the last region of a playground."""

pytestmark = pytest.mark.skipif(
    not os.environ.get("TIKV_BR_TEST_RUST_CLIENT"),
    reason="the Rust client takes minutes to build: TIKV_BR_TEST_RUST_CLIENT=1 scripts/test.sh interop",
)


@dataclass(frozen=True)
class Space:
    """A keyspace, or all of a V1 cluster, with a client of its own."""

    live: LiveCluster
    rust: LineClient
    keyspace: str = ""
    keyspace_id: int = 0

    def data(self) -> dict[bytes, bytes]:
        """Rows of the playground: other values in each keyspace."""
        return {key: value + self.keyspace.encode() for key, value in rows().items()}

    def scan(self) -> list[tuple[bytes, bytes]]:
        """All rows as the client finds them. On V1 it ends after one region without an end, and begins again after the last."""
        if self.keyspace:
            return self.rust.scan()
        last = sorted(self.rust.batch_get([key for key in self.data() if key >= LAST]).items())
        return self.rust.scan(b"", LAST) + last


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    """Return what ends the clients."""
    with ExitStack() as opened:
        yield opened


def connect(stack: ExitStack, live: LiveCluster, keyspace: str = "", keyspace_id: int = 0) -> Space:
    """Start the Rust program for a keyspace."""
    program = find_tool(
        "rust_client", hint="run scripts/install_rust_client.sh, or set RUST_CLIENT", variable="RUST_CLIENT"
    )
    return Space(
        live, stack.enter_context(LineClient([program, live.pd, *filter(None, [keyspace])])), keyspace, keyspace_id
    )


@pytest.fixture(scope="module")
def spaces(clusters: Clusters, stack: ExitStack) -> list[Space]:
    """Return three keyspaces of a V2 playground and a V1 playground, loaded by the Rust client, each with a client of its own.

    The clients returned are new ones: this client's scans lose rows when a region that it remembers has been split.
    """
    live = clusters(V2)
    ids = {name: create_keyspace(live, name) for name in KEYSPACES[1:]} | {KEYSPACES[0]: 0}
    places = [(live, name, ids[name]) for name in KEYSPACES] + [(clusters(V1), "", 0)]
    loaders = [connect(stack, *place) for place in places]
    for space in loaders:
        gone = {b"rox1": b"x", b"rox2": b"y", b"row-": b"z"}
        space.rust.batch_put(dict.fromkeys(list(space.data())[::3], b"old") | gone)
    split(live)
    split(clusters(V1))
    for space in loaders:
        space.rust.batch_put_with_ttls(with_ttls(space.data(), V2 if space.keyspace else V1))
        space.rust.delete(b"row-")
        space.rust.delete_range(KeyRange(b"rox", b"roy"))
    return [connect(stack, *place) for place in places]


def create_keyspace(live: LiveCluster, name: str) -> int:
    """Create a keyspace as PD's HTTP API does, and return its id."""
    with closing(http.client.HTTPConnection(live.pd, timeout=30)) as connection:
        connection.request("POST", "/pd/api/v2/keyspaces", json.dumps({"name": name}))
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    return int(answer["id"])


def test_both_read_the_same(spaces: list[Space]) -> None:
    """Each keyspace shows its own rows, to the Rust client and to us: scans both ways, batch gets, TTLs."""
    for space in spaces:
        expected = sorted(space.data().items())
        assert our_rows(space.live, space.keyspace_id) == expected
        assert space.scan() == expected
        assert space.rust.scan(b"row000", b"row003", keys_only=True) == [
            (key, b"") for key, _ in expected if b"row000" <= key < b"row003"
        ]
        inside = [
            row for row in reversed(expected) if b"row00150" <= row[0] < b"row00180"
        ]  # one region: no more it can
        assert space.rust.reverse_scan(b"row00180", b"row00150", 9) == inside[:9]
        some = [key for key, _ in expected][::9]
        raw = space.live.raw(space.keyspace_id)
        assert space.rust.batch_get([*some, b"missing"]) == raw.batch_get(some)
        if space.keyspace:
            for key in some:
                theirs, ours = space.rust.get_ttl(key), raw.get_ttl(key)
                assert theirs is not None
                assert ours is not None
                assert abs(theirs - ours) < TOLERANCE


def test_it_follows_our_writes(spaces: list[Space]) -> None:
    """Puts, swaps and range deletes of one are at once seen by the other, and by no other keyspace."""
    for space in spaces:
        raw = space.live.raw(space.keyspace_id)
        raw.batch_put({b"zz-%02d" % number: b"" for number in range(20)})
        assert len(space.rust.scan(b"zz-", b"zz.")) == 20
        assert space.rust.compare_and_swap(b"zz-00", b"", b"1") == CompareAndSwapResult(True, b"")
        assert compare_and_swap(raw, b"zz-00", b"1", b"2").succeeded
        space.rust.delete_range(KeyRange(b"zz-", b"zz."))
        assert raw.checksum(KeyRange(b"zz-", b"zz.")).total_kvs == 0


def test_it_reads_what_we_restore(spaces: list[Space], clusters: Clusters, stack: ExitStack, tmp_path: Path) -> None:
    """A keyspace backed up by name and a V1 cluster moved to V2 are read by the Rust client where we restore them."""
    restored = clusters(V2, "target")
    assert create_keyspace(restored, "one") == spaces[1].keyspace_id
    for number, (space, keyspace) in enumerate([(spaces[1], "one"), (spaces[3], "DEFAULT")]):
        place = StorageLocation("local", str(tmp_path / str(number)))
        backup(
            BackupOptions(
                space.live.config, place, V2, keyspaces=(space.keyspace,) if space.keyspace else (), executor="driver"
            )
        )
        assert restore(RestoreOptions(restored.config, place)).verified
        reader = connect(stack, restored, keyspace)
        assert reader.scan() == sorted(space.data().items())
        reader.rust.put(b"row00001", b"after the restore")
        assert reader.rust.get(b"row00001") == b"after the restore"
        if space.keyspace:
            key = next(key for key, _, ttl in with_ttls(space.data(), V2) if ttl)
            assert abs((reader.rust.get_ttl(key) or 0) - (space.rust.get_ttl(key) or 0)) < TOLERANCE
            assert reader.rust.get_ttl(key)
