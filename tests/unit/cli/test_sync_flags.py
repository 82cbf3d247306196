"""What the flags of ``tikv-br sync`` come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from incremental.sync import SyncOptions
from tikv_br.cli import sync_cmd
from tikv_br.cli.main import run


def test_how_often_the_checkpoint_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once a second, or as it is said: in S3 each time costs two requests."""
    asked: list[SyncOptions] = []
    monkeypatch.setattr(sync_cmd, "_follow_feed", lambda _out, options, _flags: asked.append(options))
    command = ["sync", "--pd", "127.0.0.1:1", "--sink", "blackhole://", "--state-dir", str(tmp_path)]
    for flags in ([], ["--checkpoint-every", "10s", "--sink-patience", "1m"]):
        assert run([*command, *flags]) == 0
    assert [(each.replicate.save_every, each.replicate.patience) for each in asked] == [(1.0, 600.0), (10.0, 60.0)]
