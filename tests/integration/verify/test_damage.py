"""Every kind of damage to a real backup of ours is found at the level that promises it, and by no lower one by chance."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.backup.data import hard_rows, load
from tests.support.live_cluster import live_cluster
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import BackupDamaged
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.url import parse
from tikv_br.verify.options import Executor, Finding, Level, VerifyOptions
from tikv_br.verify.run import VerifySummary, verify

FLIPS = 10
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


def run(folder: Path, level: Level, executor: Executor = Executor.DRIVER) -> VerifySummary:
    """Verify."""
    return verify(VerifyOptions(parse(f"local://{folder}"), level, executor=executor))


def found(folder: Path, level: Level, executor: Executor = Executor.DRIVER) -> set[tuple[str, Level]]:
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


def missing(path: Path) -> None:
    """Take it away."""
    path.unlink()


def empty(path: Path) -> None:
    """Leave no byte."""
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    """Cut a few bytes off."""
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("damage", [missing, empty, truncated])
def test_a_listing_shows_missing_empty_and_cut_files_at_every_level(
    copied: Path, damage: Callable[[Path], None], level: Level
) -> None:
    """The listing names any such file of the backup, first, last or in the middle, once."""
    names = files(copied)
    for name in (names[0], names[len(names) // 2], names[-1]):
        kept = (copied / name).read_bytes()
        damage(copied / name)
        assert found(copied, level) == {(name, Level.META)}
        (copied / name).write_bytes(kept)


@pytest.mark.parametrize("seed", range(FLIPS))
def test_a_flipped_bit_is_found_by_reading(copied: Path, seed: int) -> None:
    """One bit anywhere in any file: not for a listing to see, but at both levels that read the file."""
    chance = random.Random(seed)
    name = chance.choice(files(copied))
    data = bytearray((copied / name).read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    (copied / name).write_bytes(data)
    assert found(copied, Level.META) == set()
    assert found(copied, Level.FILES) == {(name, Level.FILES)}
    assert (name, Level.FILES) in found(copied, Level.DATA) <= {(name, Level.FILES), (name, Level.DATA)}


@pytest.mark.parametrize("level", LEVELS)
def test_neighbours_that_changed_places_are_both_named(copied: Path, level: Level) -> None:
    """Neighbours of other lengths are seen in the listing already."""
    # Rows contain the time, and so two files may by chance have the same length.
    pairs = [pair for pair in pairwise(files(copied)) if len({(copied / name).stat().st_size for name in pair}) == 2]
    one, other = pairs[0]
    first, second = (copied / one).read_bytes(), (copied / other).read_bytes()
    (copied / one).write_bytes(second)
    (copied / other).write_bytes(first)
    assert found(copied, level) == {(one, Level.META), (other, Level.META)}


@pytest.mark.slow
@pytest.mark.parametrize("sound", [ApiVersion.V2], indirect=True, ids=lambda version: version.label)
def test_spark_finds_the_same(copied: Path) -> None:
    """Rows, bytes and findings are those of the threads."""
    on_threads, on_spark = (run(copied, Level.DATA, executor) for executor in (Executor.DRIVER, Executor.SPARK))
    assert on_spark.executor == "spark"
    assert on_threads.session_seconds == 0 < on_spark.session_seconds < on_spark.seconds
    assert (on_spark.rows_checked, on_spark.bytes_read) == (on_threads.rows_checked, on_threads.bytes_read)
    for name in files(copied)[:2]:
        data = bytearray((copied / name).read_bytes())
        data[len(data) // 2] ^= 4
        (copied / name).write_bytes(data)
    assert found(copied, Level.DATA, Executor.SPARK) == found(copied, Level.DATA)
