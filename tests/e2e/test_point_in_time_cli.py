"""docs/point-in-time.md, run as written: only addresses, places and the time of the accident are the test's own."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, Done, environment, succeed, tikv_br
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.archive.log import LogArchive
from tikv_br.cluster import timestamps
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "point-in-time.md"
GOOD = {b"key%03d" % number: b"good %d" % number for number in range(200)}


def commands(part: str) -> list[str]:
    """The commands of a section of the guide, without the program's name."""
    (section,) = re.findall(rf"^## {part}\n(.*?)(?=^## |\Z)", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    found = re.findall(r"^\$ tikv-br (.*)$", section, re.MULTILINE)
    assert found
    return found


class Place:
    """A folder in the place of the bucket, and clusters in the place of those of the guide."""

    def __init__(self, folder: Path, source: LiveCluster, recovery: LiveCluster) -> None:
        self.folder, self.source, self.recovery = folder, source, recovery
        self.time = 0
        """Timestamp for the time of the guide."""

    def words(self, command: str) -> list[str]:
        """A command with the test's own values; backups have a backup-ts of this moment."""
        command = command.replace("10.0.0.1:2379", self.source.pd).replace("10.9.0.1:2379", self.recovery.pd)
        command = command.replace("s3://backups/", f"local://{self.folder}/").replace(
            "2026-11-22T14:31:00Z", str(self.time)
        )
        words = shlex.split(command)
        return [*words, "--safe-interval", "0s", "--executor", "driver"] if words[:2] == ["backup", "raw"] else words

    def run(self, command: str) -> Done:
        """Run a command of the guide; it must succeed."""
        return succeed(*self.words(command), "--output", "json")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Two clusters of API V2, the first with good rows."""
    with (
        live_cluster(tmp_path / "source", ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as source,
        live_cluster(tmp_path / "recovery", ApiVersion.V2, stores=1) as recovery,
    ):
        source.raw().batch_put(GOOD)
        yield Place(tmp_path, source, recovery)


@pytest.mark.core("restore")
def test_the_example(place: Place) -> None:
    """Garbage is written over good rows, and the good ones come back."""
    backup, log, status, show, dry_run, restore = commands("Example")
    place.run(backup)
    follow = [str(PROGRAM), *place.words(log), "--flush-interval", "200ms", "--hold-back", "0s", "--output", "json"]
    raw, pd = place.source.raw(), place.source.cluster.pd
    with subprocess.Popen(follow, env=environment(), cwd="/", stdout=subprocess.DEVNULL) as process:
        try:
            eventually((place.folder / "log" / "default" / "log.json").exists, PATIENCE)
            window_start = place.run(show).last["window_start"]
            raw.put(b"key000", b"better")
            raw.delete(b"key001")
            good = contents(place.source)
            reach(place, window_start)
            place.time = pd.tso()
            place.source.flush(place.source.store_ids[0])
            raw.batch_put(dict.fromkeys(GOOD, b"garbage"))
            raw.put(b"more", b"garbage")
            reach(place, pd.tso())
        finally:
            process.terminate()
            process.wait(PATIENCE)
    assert place.run(status).code == 0
    shown = place.run(show).last
    assert shown["window_start"] < place.time < shown["window_end"]
    changed = succeed(
        "log", "changes", "key000", "--storage", f"local://{place.folder / 'log'}", "--output", "json"
    ).lines
    assert [(each["op"], bytes.fromhex(each["value"])) for each in changed] == [("put", b"better"), ("put", b"garbage")]
    assert changed[0]["ts"] < place.time < changed[1]["ts"]
    planned = place.run(dry_run).last
    assert "up to 3 s later may be included" in planned["uncertainty"]
    full = "restore point s3://backups/full"
    for flags in ("--full-backup-storage s3://backups/full", "newest --full-backup-storage s3://backups/"):
        chosen = f"restore point {flags}"
        assert full in dry_run
        assert place.run(dry_run.replace(full, chosen)).last["sources"] == planned["sources"]
    later = str(timestamps.compose(timestamps.physical_ms(place.time) + 3000))
    before = succeed(
        *place.words(restore.replace("--until 2026-11-22T14:31:00Z", f"--before {later} --dry-run")),
        "--output",
        "json",
    ).last
    assert place.time - (1 << 20) < before["restore_ts"] <= place.time
    assert "or later is included" in before["uncertainty"]
    assert (planned["restore_ts"], len(planned["sources"])) == (place.time, 2)
    assert not contents(place.recovery)
    report = place.folder / "report.html"
    done = place.run(f"{restore} --report {report}")
    assert "up to 3 s later may be included" in report.read_text()
    assert done.last["verified"]
    assert contents(place.recovery) == good
    assert not list(place.folder.glob("log/restore-*/*"))
    refused = tikv_br(*place.words(dry_run), "--output", "json")
    assert (refused.code, refused.last["name"]) == (40, "TargetNotEmpty")
    assert "Point in time" in succeed(*place.words(dry_run), "--allow-overwrite", "--quiet").out
    again = succeed(*place.words(restore), "--allow-overwrite", "--quiet")
    assert again.out == ""
    merge, repair = commands("Repair the damaged cluster")
    place.run(merge)
    place.run(repair)
    assert contents(place.source) == good


def reach(place: Place, ts: int) -> None:
    """Wait until the log has come to a timestamp."""
    store = open_store(parse(f"local://{place.folder / 'log'}"))

    def has_come() -> bool:
        for store_id in place.source.store_ids:
            place.source.flush(store_id)
        return LogArchive.open(store, "default").end_ts() > ts

    eventually(has_come, PATIENCE)


def test_incremental_backups(place: Place) -> None:
    """The chain of the guide; then one that was merged, and what is refused."""
    sunday, monday, tuesday, restore = commands("Incremental backups")
    raw = place.source.raw()
    place.run(sunday)
    raw.batch_put({b"key%03d" % number: b"monday" for number in range(50)})
    assert place.run(monday).last["engine"] == "changes"
    raw.batch_delete([b"key%03d" % number for number in range(25)])
    assert place.run(tuesday).last["total_kvs"] == 0
    place.run(restore)
    assert contents(place.recovery) == contents(place.source)
    merged = place.run(commands("A new full backup without reading the cluster")[0])
    assert (merged.last["total_kvs"], merged.last["executor"]) == (len(GOOD) - 25, "driver")
    listed = succeed("list", "--storage", f"local://{place.folder}", "--output", "json").lines
    parents = {Path(line["url"]).name: Path(line["parent"]).name for line in listed}
    assert parents == {"sunday": "", "monday": "sunday", "tuesday": "monday", "new-full": ""}
    tuesday_id = next(line["id"] for line in listed if Path(line["url"]).name == "tuesday")
    again = place.run(f"backup merge {tuesday_id} --base s3://backups/ --storage s3://backups/again")
    assert again.last["total_kvs"] == merged.last["total_kvs"]
    nothing = tikv_br(
        *place.words(commands("A new full backup without reading the cluster")[0].replace("tuesday", "sunday"))
    )
    assert nothing.code == 2
