"""Playgrounds for drills: the command line alone may start any."""

from __future__ import annotations

from pathlib import Path

from formats.api_version import ApiVersion
from tikv_br.playground import launcher


class Host:
    """Runs playgrounds, as `tikv_br.drill.target.PlaygroundHost` asks."""

    def start(self, folder: Path, api_version: ApiVersion, stores: int) -> str:
        """Start one that outlives this process; returns its PD address. Raises `PlaygroundError`."""
        started = launcher.start(folder, {"api_version": api_version.value, "stores": stores})
        return str(started.state["pd"])

    def stop(self, folder: Path) -> None:
        """Stop the one of a folder, if one runs. Raises `PlaygroundError`."""
        if folder.exists():
            launcher.stop(folder)
