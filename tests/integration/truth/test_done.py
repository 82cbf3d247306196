"""Exit code 0 of each command, and that what it promises is there: looked for by other means than the command's own words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.truth.calls import CALLS, ENDLESS
from tests.integration.truth.conftest import World, made
from tests.integration.truth.proofs import PROOFS, with_more


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world with an interrupted run and a list of playgrounds of its own."""
    with made(tmp_path) as world:
        yield with_more(world, monkeypatch)


def test_each_command_that_ends_has_a_proof() -> None:
    """A new command must define the meaning of its 0."""
    assert PROOFS.keys() | ENDLESS == CALLS.keys()


def test_reported_successes_are_real(prepared: World) -> None:
    """Commands run in an order in which each finds what it needs."""
    early = [path for path in PROOFS if path not in {("prune",), ("backup", "abort"), ("playground", "stop")}]
    for command in [*early, ("prune",), ("backup", "abort"), ("playground", "stop")]:
        instead = {"pd": prepared.target.pd} if command == ("raw", "import") else {}
        ended = prepared.call(command, "--output", "json", **instead)
        assert ended.code == 0, (command, ended)
        assert PROOFS[command](prepared, ended), (command, ended)
