"""The folder that a drill's playground gets."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tikv_br.drill.playground import PlaygroundTarget
from tikv_br.errors import DrillRemains, PlaygroundError
from tikv_br.formats.api_version import ApiVersion

if TYPE_CHECKING:
    from tikv_br.backupset.backup_set import BackupSet


class Host:
    """Runs no playground, and notes the rights of the folder that it would run in."""

    def __init__(self) -> None:
        self.modes: list[int] = []

    def start_detached(self, folder: Path, api_version: ApiVersion, stores: int) -> str:
        """Look, and end it there."""
        self.modes += [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder.parent.parent)]
        raise PlaygroundError(f"{stores} stores of {api_version} are not for this test")

    def stop(self, folder: Path) -> None:
        """Nothing runs."""


class Backup:
    """As much of a backup as is asked for."""

    api_version = ApiVersion.V2


def make(target: PlaygroundTarget) -> None:
    """Have it made for a backup."""
    target.make(target.plan("drill"), "drill", cast("BackupSet", Backup()))


def test_nobody_else_can_look_into_it(tmp_path: Path) -> None:
    """Data of a backup are restored there: folder and parent are for their owner, whatever the umask."""
    host = Host()
    before = os.umask(0)
    try:
        with pytest.raises(PlaygroundError):
            make(PlaygroundTarget(host, tmp_path / "drills"))
    finally:
        os.umask(before)
    assert host.modes == [0o700, 0o700]


def test_a_place_that_another_user_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could exchange the contents."""
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr("tikv_br.drill.playground.ROOT", -1)
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(DrillRemains, match="another user"):
        make(PlaygroundTarget(Host(), tmp_path))
    assert list(tmp_path.iterdir()) == []
