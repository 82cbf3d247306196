"""The recording that the repository carries: complete, small, unpacked once."""

from __future__ import annotations

import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.tools import GOLDEN_ARCHIVES, unpack_golden


def archive(folder: Path, text: str) -> None:
    """Write an archive with one file of that text."""
    source = folder / "frames.bin"
    source.write_text(text)
    with tarfile.open(folder / "cdc.tar.xz", "w:xz") as packed:
        packed.add(source, "cdc/frames.bin")


def test_the_repository_carries_every_folder_in_at_most_15_mib() -> None:
    """A clone needs no other data to run the golden tests, and stays small."""
    assert {path.name.partition(".")[0] for path in GOLDEN_ARCHIVES.glob("*.tar.xz")} == {
        "backups",
        "cdc",
        "etcd",
        "kafka",
        "sst",
        "txn",
        "wire",
    }
    assert sum(path.stat().st_size for path in GOLDEN_ARCHIVES.iterdir()) < 15 << 20


def test_concurrent_workers_share_one_complete_folder(tmp_path: Path) -> None:
    """Workers of pytest-xdist that unpack at the same time get the same folder, and no other folder is left."""
    archive(tmp_path, "recorded")
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: unpack_golden(tmp_path, cache), range(4)))
    assert list(cache.iterdir()) == [*folders]
    assert [(folder / "cdc" / "frames.bin").read_text() for folder in folders] == ["recorded"]


def test_another_recording_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    """Files of an earlier recording are never mixed with those of a new one."""
    archive(tmp_path, "first")
    first = unpack_golden(tmp_path, tmp_path / "cache")
    archive(tmp_path, "second")
    second = unpack_golden(tmp_path, tmp_path / "cache")
    assert (second / "cdc" / "frames.bin").read_text() == "second"
    assert (first / "cdc" / "frames.bin").read_text() == "first"
