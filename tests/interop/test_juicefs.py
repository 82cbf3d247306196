"""JuiceFS keeps the metadata of a file system in the playground: its own checks find nothing, and would if there were something."""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import tikv_br
from tests.support.juicefs import JuiceFs, JuiceFsFailed, files_in
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import encode

SIZES = [0, 1, 4095, 100_000, (4 << 20) + 1, *range(1000, 1040)]
"""Sizes of files: none, some, and more than one block of data."""
FILES_OF_MDTEST = 2 * 13 * 20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A playground of three stores that the volumes of the tests share."""
    with live_cluster(tmp_path_factory.mktemp("playground"), ApiVersion.V1, stores=3) as found:
        yield found


@pytest.fixture
def volume(live: LiveCluster, tmp_path: Path, request: pytest.FixtureRequest) -> JuiceFs:
    """A new volume."""
    made = JuiceFs(live.pd, tmp_path, str(request.node.name).replace("_", "-")[:40])
    made.format()
    return made


def source_of(folder: Path) -> dict[str, int]:
    """Write files; their paths and sizes."""
    chosen = random.Random(26)
    for number, size in enumerate(SIZES):
        path = folder / f"{number % 3}" / f"file {number} of {size} \N{GREEK SMALL LETTER ALPHA}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chosen.randbytes(size))
    return {f"/{path.relative_to(folder)}": path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def digests(folder: Path) -> dict[str, str]:
    """Hash of each file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def disturb(live: LiveCluster, volume: JuiceFs, inodes: range) -> None:
    """Split regions between inodes and move all leaders, again and again."""
    prefix = volume.name.encode() + b"\xfdA"
    for number, inode in enumerate(inodes):
        live.split(encode(prefix + inode.to_bytes(8, "little")))
        for region in live.regions():
            others = [store for store in live.store_ids if store != region["leader_store"]]
            live.transfer_leader(region_id=region["id"], store_id=others[number % len(others)])
        time.sleep(0.05)


def test_a_volume(live: LiveCluster, volume: JuiceFs, tmp_path: Path) -> None:
    """Two clients write while regions split and leaders move; checks find nothing, and all files come out as they went in."""
    files = source_of(tmp_path / "source")
    workload = volume.mdtest("/mdtest", "--threads", "2", "--files", "20")
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(volume.copy_in, tmp_path / "source", "data")
        testing = pool.submit(volume.run, *workload)
        disturb(live, volume, range(1, 2000, 100))
        copying.result()
        testing.result()
    volume.fsck()
    assert f"using {sum(size > 0 for size in SIZES)} slices" in volume.run("gc", volume.url)
    tree = volume.dump()["FSTree"]["entries"]
    assert files_in(tree["data"]) == files
    assert list(files_in(tree["mdtest"]).values()) == [0] * FILES_OF_MDTEST
    binary = tmp_path / "dump"
    volume.run("dump", volume.url, str(binary), "--binary")
    copied = JuiceFs(live.pd, tmp_path, f"{volume.name}-2")
    copied.run("load", copied.url, str(binary), "--binary")
    assert copied.dump()["FSTree"] == volume.dump()["FSTree"]
    volume.copy_out("data", tmp_path / "copy")
    assert digests(tmp_path / "copy") == digests(tmp_path / "source")


def test_lost_data_are_found(volume: JuiceFs, tmp_path: Path) -> None:
    """fsck, which the other tests rely on, reports a file whose object is missing."""
    source_of(tmp_path / "source")
    volume.copy_in(tmp_path / "source", "data")
    volume.fsck()
    lost = volume.blocks[0]
    lost.rename(tmp_path / "lost")
    with pytest.raises(JuiceFsFailed, match="objects are lost"):
        volume.fsck()


def test_a_killed_client(volume: JuiceFs, tmp_path: Path) -> None:
    """Killed while its threads commit, three times: others go on at once, no file is half there, and a later check finds nothing."""
    for number in range(3):
        with volume.start(*volume.mdtest(f"/killed-{number}", "--threads", "8", "--files", "10000")) as process:
            eventually(lambda number=number: f"killed-{number}" in volume.dump()["FSTree"]["entries"])  # type: ignore[misc]
            time.sleep(number / 5)
            process.send_signal(signal.SIGKILL)
        volume.run(*volume.mdtest(f"/after-{number}", "--files", "5"))
    source_of(tmp_path / "source")
    volume.copy_in(tmp_path / "source", "data")
    volume.fsck()
    tree = volume.dump()["FSTree"]["entries"]
    assert {name: len(files_in(entry)) for name, entry in tree.items() if name.startswith("after")} == {
        f"after-{number}": 13 * 5 for number in range(3)
    }


def test_backups(live: LiveCluster, volume: JuiceFs, tmp_path: Path) -> None:
    """One made while directories are: each is whole. One made later: the dump of the restored copy is the same, and no object is missing."""
    files = source_of(tmp_path / "source")
    volume.copy_in(tmp_path / "source", "data")
    with volume.start(*volume.mdtest("/busy", "--dirs", "3", "--depth", "9")) as process:
        eventually(lambda: "busy" in volume.dump()["FSTree"]["entries"])
        back_up(live, volume, tmp_path / "busy")
        assert process.poll() is None
        process.kill()
    expected = volume.dump()
    back_up(live, volume, tmp_path / "quiet")
    busy, quiet = (restored(volume, tmp_path, name) for name in ("busy", "quiet"))
    assert quiet == expected
    assert files_in(busy["FSTree"]["entries"]["data"]) == files
    directories = list(directories_in(busy["FSTree"]))
    assert 0 < len(directories) < len(list(directories_in(expected["FSTree"])))
    for directory in directories:
        assert directory["attr"]["nlink"] == 2 + sum("entries" in child for child in directory["entries"].values())


def back_up(live: LiveCluster, volume: JuiceFs, folder: Path) -> None:
    """Back up the metadata of one volume."""
    done = tikv_br("backup", "txn", "--pd", live.pd, "--storage", str(folder), "--prefix", rf"{volume.name}\xfd")
    assert done.code == 0, done


def restored(volume: JuiceFs, folder: Path, name: str) -> dict[str, Any]:
    """The dump of a volume restored from a backup, which has all objects."""
    with live_cluster(folder / f"target-{name}", ApiVersion.V1, stores=3) as target:
        done = tikv_br("restore", "txn", str(folder / name), "--pd", target.pd)
        assert done.code == 0, done
        copy = JuiceFs(target.pd, volume.folder, volume.name)
        copy.fsck()
        return copy.dump()


def directories_in(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The directories of a dump."""
    if "entries" in entry:
        yield entry
        for child in entry["entries"].values():
            yield from directories_in(child)
