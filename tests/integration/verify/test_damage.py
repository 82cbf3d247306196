"""Every kind of damage to a real backup of ours is found at the level that promises it, and by no lower one by chance."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.backup.data import hard_rows, load
from tests.support.live_cluster import live_cluster
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import BackupDamaged
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.url import parse
from tikv_br.tasks.executor import ExecutorChoice
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import VerifySummary, verify

LEVELS = (Level.META, Level.FILES, Level.DATA)


@pytest.fixture(scope="module", params=[ApiVersion.V1TTL, ApiVersion.V2], ids=lambda version: version.label)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup in several files, with rows that expire."""
    version: ApiVersion = request.param
    folder = tmp_path_factory.mktemp(version.label)
    with live_cluster(folder / "cluster", version, regions=6) as live:
        load(live, hard_rows(count=800))
        load(live, {b"expires%03d" % number: b"value" for number in range(300)}, ttl=86_400)
        backup(
            BackupOptions(
                cluster=live.config,
                storage=parse(f"local://{folder / 'backup'}"),
                file_bytes=20_000,
                safe_interval=0.0,
                executor="driver",
            )
        )
    return folder / "backup"


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to damage."""
    shutil.copytree(sound, tmp_path / "copy")
    yield tmp_path / "copy"
    shutil.rmtree(tmp_path / "copy")


def run(folder: Path, level: Level, executor: ExecutorChoice = "driver") -> VerifySummary:
    """Verify."""
    return verify(VerifyOptions(parse(f"local://{folder}"), level, executor=executor))


def found(folder: Path, level: Level, executor: ExecutorChoice = "driver") -> set[tuple[str, Level]]:
    """Object and level of each finding; none when all is right."""
    findings: list[Finding] = []
    options = VerifyOptions(parse(f"local://{folder}"), level, executor=executor)
    try:
        verify(options, on_finding=findings.append)
    except BackupDamaged:
        assert findings
    else:
        assert not findings
    return {(finding.object, finding.level) for finding in findings}


def files(folder: Path) -> list[str]:
    """Names of the SSTs."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.sst"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_sound_backup_passes(sound: Path, level: Level) -> None:
    """With all its expiring, empty, long and hostile rows; level data counts every one."""
    summary = run(sound, level)
    assert summary.files == len(files(sound)) > 3
    assert summary.rows_checked == (len(hard_rows(count=800)) + 300 if level is Level.DATA else 0)


@pytest.mark.slow
@pytest.mark.parametrize("sound", [ApiVersion.V2], indirect=True, ids=lambda version: version.label)
def test_spark_finds_the_same(copied: Path) -> None:
    """Rows, bytes and findings are those of the threads."""
    on_threads, on_spark = (run(copied, Level.DATA, executor) for executor in ("driver", "spark"))
    assert on_spark.executor == "spark"
    assert on_threads.session_seconds == 0 < on_spark.session_seconds < on_spark.seconds
    assert (on_spark.rows_checked, on_spark.bytes_read) == (on_threads.rows_checked, on_threads.bytes_read)
    for name in files(copied)[:2]:
        data = bytearray((copied / name).read_bytes())
        data[len(data) // 2] ^= 4
        (copied / name).write_bytes(data)
    assert found(copied, Level.DATA, "spark") == found(copied, Level.DATA)
