"""Pairs of playgrounds that the tests of a module share, and what plants differences in them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.backup.data import hard_rows
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.compare.report import DifferenceKind
from tikv_br.diff.run import DiffResult
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

ROWS = hard_rows(count=1500)
Clusters = Callable[[str], LiveCluster]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Return a function from a name such as ``v1-a`` to a running playground of that API version."""
    running: dict[str, LiveCluster] = {}
    with contextlib.ExitStack() as stack:

        def get(name: str) -> LiveCluster:
            if name not in running:
                version = ApiVersion[name.partition("-")[0].upper()]
                folder: Path = tmp_path_factory.mktemp(name)
                running[name] = stack.enter_context(live_cluster(folder, version, stores=1))
                split(running[name], 5 if name.endswith("a") else 3)
            return running[name]

        yield get


def split(live: LiveCluster, regions: int) -> None:
    """Cut into regions between the rows; each cluster elsewhere."""
    codec = live.raw().codec
    keys = sorted(ROWS)[:: len(ROWS) // regions][1:regions]
    live.split(*(codec.bound(codec.rpc_key(key)) for key in keys))


def fill(live: LiveCluster, rows: dict[bytes, bytes], keyspace_id: int = 0) -> None:
    """Have these rows, and no others, whatever another test left."""
    raw = live.raw(keyspace_id)
    raw.delete_range(EVERY_KEY)
    raw.batch_put(rows)


def plant(live: LiveCluster, seed: int) -> dict[bytes, DifferenceKind]:
    """Lose, change and add some rows of B; returns how each differs."""
    chance = random.Random(seed)
    raw = live.raw()
    victims = chance.sample(sorted(ROWS), 9)
    planted = dict.fromkeys(victims[:3], DifferenceKind.ONLY_A) | dict.fromkeys(victims[3:], DifferenceKind.VALUE)
    raw.batch_delete(victims[:3])
    raw.batch_put({key: ROWS[key] + chance.randbytes(4) for key in victims[3:]})
    added = {chance.randbytes(50): b"added" for _ in range(4)}
    raw.batch_put(added)
    return planted | dict.fromkeys(added, DifferenceKind.ONLY_B)


def found(result: DiffResult) -> dict[bytes, DifferenceKind]:
    """All keys that differ."""
    assert len(result.keys) == result.summary.only_a + result.summary.only_b + result.summary.value
    return {difference.key: difference.kind for difference in result.keys}
