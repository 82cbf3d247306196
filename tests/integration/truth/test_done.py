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
    """A world that is used up, with a run that was broken off, and no list of playgrounds but one of its own."""
    with made(tmp_path) as world:
        yield with_more(world, monkeypatch)


def test_each_command_that_ends_has_a_proof() -> None:
    """A new command must say what its 0 means."""
    assert PROOFS.keys() | ENDLESS == CALLS.keys()


def test_what_is_said_to_be_done_is_done(prepared: World) -> None:
    """In an order in which each finds what it needs."""
    early = [path for path in PROOFS if path not in {("prune",), ("abort",), ("playground", "stop")}]
    for command in [*early, ("prune",), ("abort",), ("playground", "stop")]:
        instead = {"pd": prepared.target.pd} if command == ("raw", "import") else {}
        ended = prepared.call(command, "--output", "json", **instead)
        assert ended.code == 0, (command, ended)
        assert PROOFS[command](prepared, ended), (command, ended)
