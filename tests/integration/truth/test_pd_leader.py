"""Each command while PD's leader resigns and dies again and again: it ends with 0, and what it promises is there."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.integration.truth.calls import CALLS
from tests.integration.truth.conftest import made
from tests.integration.truth.proofs import PROOFS, with_more
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster
from tikv_br.cli.command import CommandPath

KILL_EVERY = 3
PAUSE = 2.0
"""Seconds from the end of a change to the next one."""


class LeaderChanges:
    """Leader changes of one cluster; some of them are deaths."""

    def __init__(self, live: LiveCluster) -> None:
        self._live = live
        self._numbers = itertools.count(1)

    def step(self) -> None:
        """One change, unless the last one is not over."""
        kill = next(self._numbers) % KILL_EVERY == 0
        self._live.change_pd_leader(kill=kill, seconds=1.5 if kill else 0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_survive_changes_of_pds_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order in which each finds what it needs; in peace those that ask no PD."""
    with made(tmp_path, retry_budget=30.0, pd_members=3) as world:
        with_more(world, monkeypatch)
        changes = [LeaderChanges(live) for live in (world.source, world.target)]
        unfit = {("prune",), ("backup", "abort")}
        for command in [path for path in PROOFS if path not in unfit and path[0] not in {"playground", "spark"}]:
            instead = {"pd": world.target.pd} if command == ("raw", "import") else {}
            disturbed = changes if asks_pd(command) else []
            with Background([(change.step, PAUSE) for change in disturbed]):
                for change in disturbed:
                    change.step()
                ended = world.call(command, "--output", "json", **instead)
            assert ended.code == 0, (command, ended)
            for live in (world.source, world.target):
                live.await_pd()
            assert PROOFS[command](world, ended), (command, ended)


def asks_pd(command: CommandPath) -> bool:
    """Whether its call names a cluster."""
    return "{pd}" in CALLS[command] or "{target}" in CALLS[command]
