"""Playgrounds for the command line, one of each API version, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import succeed

VERSIONS = ("v1", "v1ttl", "v2")


class Playgrounds:
    """PD addresses by API version; each is started, by the command line itself, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, str] = {}

    def __getitem__(self, version: str) -> str:
        if version not in self._started:
            place = str(self._folder / version)
            started = succeed(
                "playground",
                "start",
                "--dir",
                place,
                "--api-version",
                version,
                "--keyspace",
                "ks=4242",
                "--detach",
                "--output",
                "json",
            )
            self._started[version] = started.last["pd"]
        return self._started[version]

    def stop(self) -> None:
        """End those that run."""
        for version in self._started:
            succeed("playground", "stop", "--dir", str(self._folder / version))


@pytest.fixture(scope="module")
def playgrounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playgrounds]:
    """Return running playgrounds by API version."""
    running = Playgrounds(tmp_path_factory.mktemp("playgrounds"))
    yield running
    running.stop()
