"""All that leads to the rows of a point in time, killed at random moments: backups, increments, the log, merges, compactions, restores."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.crash.cells import FULL, ending
from tests.integration.crash.operations import COMPACTION
from tests.integration.crash.seams import killed_at
from tests.integration.crash.world import files
from tests.integration.incremental.forked_sync import Syncs
from tests.integration.incremental.workload import FEED_FAULTS, KEYS, Commotion, Writer, key_of
from tests.integration.restore.points import check, times_in
from tests.support import history
from tests.support.background import Background
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.archive.compact import CompactionOptions, compact
from tikv_br.archive.log import LogArchive, LogSource
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.cli.main import run
from tikv_br.dataflow.read import MergeSources
from tikv_br.errors import BackupPathInUse, TargetNotEmpty
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

PATIENCE = 120.0
KILLS, EACH, TIMES = (30, 5, 50) if os.environ.get(FULL) else (10, 2, 6)
"""Minimum number of kills, maximum per command, and number of times checked per backup."""
MOMENTS = 40
"""A command is killed before or after one of so many first changes."""
MOST_OBJECTS = 8
"""Maximum of files, segments and checkpoints that the writer of the log writes before it is killed."""
NEVER = 1 << 30
WRITERS = 3
LOG_ID = "main"
BACKUPS = ("full", "increment", "merged", "later")
SPLIT_KEY = key_of(KEYS // 2)
"""Two ranges, so that each backup has two tasks at least."""
MERGE = ("backup", "merge", "--executor", "driver")


class Commands:
    """Runs commands that are killed, each until it has succeeded."""

    def __init__(self, forks: Forks, chance: random.Random) -> None:
        self.kills = Counter[str]()
        """By command."""
        self._forks, self._chance = forks, chance

    def run(self, *words: str) -> None:
        """Run the same command again and again, to its end at last."""
        code, kills = self._repeat(" ".join(words[:2]), partial(run, [*words, "--quiet"]))
        # One that was killed after its last change is complete.
        complete = {"backup": BackupPathInUse.exit_code, "restore": TargetNotEmpty.exit_code}
        assert code == 0 or (kills and code == complete[words[0]])

    def compact(self, log: LogSource) -> None:
        """Compact a log in several tasks, and keep nothing of what was replaced before."""
        size = sum(file.total_bytes for each in opened(log).segments for file in each.files)
        options = structs.replace(
            COMPACTION, storage=log.storage, log_id=log.id, task_bytes=size // 3, file_bytes=size // 6
        )
        assert self._repeat("log compact", partial(compacted, options))[0] == 0

    def _repeat(self, name: str, operation: Callable[[], int]) -> tuple[int, int]:
        """Run an operation until it is not killed; its exit code, and the number of kills."""
        kills = 0
        while True:
            moment = self._chance.randrange(MOMENTS) if kills < EACH else NEVER
            self._forks.start(partial(killed_at, operation, moment))
            code = self._forks.wait()
            if code != -signal.SIGKILL:
                break
            kills += 1
        self.kills[name] += kills
        return code, kills


def compacted(options: CompactionOptions) -> int:
    """Compact a log; the exit code."""
    return ending(lambda _: compact(options), lambda _: None)


def opened(log: LogSource) -> LogArchive:
    """The log as its records say."""
    return LogArchive.open(open_store(log.storage), log.id)


class Follower:
    """A process that writes the log, killed and started again."""

    def __init__(self, source: LiveCluster, folder: Path, syncs: Syncs, chance: random.Random) -> None:
        self.kills = 0
        self.log = LogSource(parse(f"local://{folder / 'log'}"), LOG_ID)
        self._source, self._syncs, self._chance = source, syncs, chance
        sink = f"{self.log.storage.redacted()}?flush-interval=300ms"
        self._words = ["--id", LOG_ID, "--pd", source.pd, "--sink", sink, "--start-ts", "now", "--hold-back", "0.5s"]
        self._words += ["--scratch-dir", str(folder)]
        self._pid = syncs.begin(self._words)

    def kill(self) -> None:
        """Kill the process once it has written something more, and start another."""
        enough = self._objects() + self._chance.randrange(MOST_OBJECTS)
        eventually(lambda: self._objects() >= enough, PATIENCE)
        self._syncs.kill(self._pid)
        self.kills += 1
        self._pid = self._syncs.begin(self._words)

    def reach(self, ts: int) -> None:
        """Wait until the log has all changes up to a timestamp."""
        eventually(Path(self.log.storage.path, LOG_ID, "log.json").exists, PATIENCE)

        def has_come() -> bool:
            for store_id in self._source.store_ids:  # or their cached timestamps would be waited for
                self._source.flush(store_id)
            return opened(self.log).end_ts() > ts

        eventually(has_come, PATIENCE)

    def reach_after(self, newest: StorageLocation) -> int:
        """Wait until a time after a backup and after the start of the process can be restored exactly; the newest such time."""
        found = [self._source.cluster.pd.tso()]

        def has_come() -> bool:
            first, last = MergeSources.open(newest, self.log).window()
            found.append(last)
            return last > max(first, found[0])

        eventually(has_come, PATIENCE)
        return found[-1]

    def end(self) -> None:
        """End the process in order."""
        self._syncs.end(self._pid)

    def _objects(self) -> int:
        return sum(1 for _ in Path(self.log.storage.path).glob("*/**/*"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_is_killed_and_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    """From a full backup, an increment, a merged backup, an increment on that, each with the log; and in a cluster."""
    seed = int(os.environ.get("TIKV_BR_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    chance = random.Random(seed)
    root = tmp_path / "backups"
    full, increment, merged, later = (parse(f"local://{root / name}") for name in BACKUPS)
    quick = {"election_timeout": 0.5, "resolved_ts_interval": 0.1, "ts_ahead": 0.3}
    with (
        live_cluster(tmp_path / "source", ApiVersion.V2, stores=3, **quick) as source,
        Forks("tests.integration.crash.warm", __name__) as forks,
        Syncs() as syncs,
    ):
        commands = Commands(forks, chance)
        codec = source.raw().codec
        source.split(*(codec.bound(codec.rpc_key(key_of(number))) for number in range(0, KEYS, 60)))
        source.raw().batch_put({key_of(number): b"at first" for number in range(KEYS)})
        follower = Follower(source, tmp_path, syncs, chance)
        log = ["--log", follower.log.storage.redacted(), "--log-id", LOG_ID]
        back_up = ["backup", "raw", "--pd", source.pd, "--safe-interval", "0s", "--executor", "driver"]
        halves = ["--range", f":hex:{SPLIT_KEY.hex()}", "--range", f"hex:{SPLIT_KEY.hex()}:"]
        follower.reach(source.cluster.pd.tso())
        writers = [Writer(source.raw(), seed, number) for number in range(WRITERS)]
        commotion = Commotion(source, seed, range(5, 12), FEED_FAULTS)
        with Background([*((writer.step, 0.02) for writer in writers), (commotion.step, 0.5)]):
            commands.run(*back_up, *halves, "--storage", full.redacted())
            follower.kill()
            commands.run(*back_up, "--storage", increment.redacted(), "--base", full.redacted())
            follower.kill()
            until = ["--until", str(follower.reach_after(increment))]
            commands.run(*MERGE, "--storage", merged.redacted(), "--base", increment.redacted(), *log, *until)
            follower.kill()
            commands.compact(follower.log)
            commands.run(*back_up, "--storage", later.redacted(), "--base", merged.redacted())
            while follower.kills < KILLS // 5:
                follower.kill()
            follower.reach_after(later)
        source.heal()
        follower.reach(source.cluster.pd.tso())
        follower.end()
        versions = history.read(tmp_path / "source", tmp_path / "scratch")
        check_alone(root)
        times = {
            newest: times_in(MergeSources.open(newest, follower.log), TIMES, chance)
            for newest in (full, increment, merged, later)
        }
        segments = len(opened(follower.log).segments)
        for is_compact in (False, True):
            if is_compact:
                commands.compact(follower.log)
            for newest, known in times.items():
                for ts in known[is_compact::2]:
                    check(tmp_path, newest, follower.log, ts, versions)
        assert len(opened(follower.log).segments) < segments
        with live_cluster(tmp_path / "target", ApiVersion.V2) as target:
            restore = ["restore", "raw", "--pd", target.pd, "--executor", "driver", *log]
            while commands.kills["restore raw"] == 0 or commands.kills.total() + follower.kills < KILLS:
                newest = chance.choice([full, increment, merged, later])
                ts = chance.choice(times[newest])
                commands.run(*restore, "--storage", newest.redacted(), "--until", str(ts))
                first = target.cluster.pd.tso()
                found = contents(target).items()
                last = target.cluster.pd.tso()
                assert still_alive(versions, ts, last).items() <= found <= still_alive(versions, ts, first).items()
                target.raw().delete_range(EVERY_KEY)
        assert not [name for name in files(tmp_path / "log", but="//") if name.startswith("restore-")]
        check_alone(root)
        print(f"{dict(commands.kills)} and {follower.kills} of the log's writer")  # noqa: T201


def still_alive(versions: history.History, ts: int, now: int) -> dict[bytes, bytes]:
    """The rows of a timestamp that have not expired since."""
    expiry = {
        key: max(each for each in found if each.ts <= ts).expire_ts
        for key, found in versions.items()
        if found[0].ts <= ts
    }
    rows = history.rows_at(versions, ts)
    return {key: value for key, value in rows.items() if not 0 < expiry[key] <= (now >> 18) // 1000}


def check_alone(root: Path) -> None:
    """All backups are in the index, and of none there is more than its files and records."""
    store = open_store(parse(f"local://{root}"))
    assert sorted(each.entry.path for each in Index(store).read()) == sorted(BACKUPS)
    for name in BACKUPS:
        found = BackupSet.open(open_store(store.location.child(name)))
        expected = {layout.META, layout.LOCK, layout.MANIFEST} | {file.name for file in found.files}
        assert set(files(root / name, but="//")) == expected
