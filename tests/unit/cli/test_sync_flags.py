"""Options made from the flags of ``tikv-br sync``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tikv_br.cli import sync_cmd
from tikv_br.cli.backup_flags import StorageFlags
from tikv_br.cli.changefeed_cmd import check_applies
from tikv_br.cli.main import run
from tikv_br.cli.sync_flags import StartFlags
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import UsageError
from tikv_br.incremental.handover import FromNow, FromTs
from tikv_br.incremental.sync import SyncOptions


def test_how_often_the_checkpoint_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once a second, or as it is said: in S3 each time costs two requests."""
    asked: list[SyncOptions] = []
    monkeypatch.setattr(sync_cmd, "follow_feed", lambda _out, options, _flags: asked.append(options))
    command = ["sync", "--pd", "127.0.0.1:1", "--sink", "blackhole://", "--state-dir", str(tmp_path)]
    for flags in ([], ["--checkpoint-every", "10s", "--sink-patience", "1m"]):
        assert run([*command, *flags]) == 0
    assert [(each.replicate.save_every, each.replicate.patience) for each in asked] == [(1.0, 600.0), (10.0, 60.0)]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("now", FromNow()),
        ("449000000000000000", FromTs(449000000000000000)),
        ("2026-05-02T10:00:00Z", FromTs(1777716000000 << 18)),
    ],
)
def test_start_ts_forms(text: str, start: object) -> None:
    """A PD timestamp, a time with its offset, or now."""
    assert StartFlags(start_ts=text).start(StorageFlags(), ClusterConfig(("127.0.0.1:1",))) == start


@pytest.mark.parametrize("text", ["latest", "0", "tomorrow", "2026-05-02"])
def test_other_start_ts_are_refused(text: str) -> None:
    """Also a time without an offset, which could be of any time zone."""
    with pytest.raises(UsageError, match="--start-ts"):
        StartFlags(start_ts=text).start(StorageFlags(), ClusterConfig(("127.0.0.1:1",)))


def test_new_settings_of_a_changefeed_must_apply_to_its_sink() -> None:
    """As for a new one: a Kafka producer has neither requests nor rows."""
    check_applies({"rate_limit", "hold_back_ms"}, "kafka://host:9092/topic")
    check_applies({"concurrency", "batch_rows"}, "tikv://pd:2379")
    for field in ("concurrency", "batch_rows"):
        with pytest.raises(UsageError, match="writes to Kafka"):
            check_applies({field, "hold_back_ms"}, "kafka://host:9092/topic")
