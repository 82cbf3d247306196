"""One seed of faulty clusters: load, checksum, backup, verify, restore, diff and syncs while both clusters are never at rest."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.incremental.kafka_events import check_resolved, live_rows, open_events
from tests.integration.incremental.workload import KEYS, key_of
from tests.integration.kafka_server import KafkaBroker, kafka_broker
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.trust.commands import Tally, command
from tests.trust.soak import syncing
from tests.trust.trouble import Trouble
from tikv_br.errors import ClusterUnreachable, RetryBudgetExhausted
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.checkpoint import ObjectCheckpoints
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

AGAIN = frozenset({ClusterUnreachable.exit_code, RetryBudgetExhausted.exit_code})
"""Exit codes that a command may end with, because a cluster did not answer, or not well, for too long."""
PAUSE, QUICK_PAUSE = 0.3, 0.5
"""Seconds between two things that are done to a cluster; the latter up to `QUICK`."""
GONE = 1.0
"""Seconds for which a killed store stays away, at most."""
LONG_GONE, LONG_EVERY = 30.0, 25
"""The same for every so-manieth seed, of those above `QUICK`: a real store's restart."""
PD_GONE = 70.0
"""Seconds for which PD is gone once in the seed after such a one: longer than the budget of commands."""
QUICK = 20
"""Seeds up to this one are among the tests."""
MIRROR_EVERY = 5
"""Up to `QUICK` only the syncs' end of every so-manieth seed is waited for and compared; they run through all of them. These seeds also
restore into the source, which both syncs follow."""
PATIENCE = 180.0
"""Seconds that the sync may take to catch up."""
HOLD_BACK = "1s"


@dataclass(frozen=True)
class Clusters:
    """A source, a target for restores, and a mirror and a topic in open-protocol that syncs keep, with the ``checkpoints`` of both."""

    source: LiveCluster
    target: LiveCluster
    mirror: LiveCluster
    broker: KafkaBroker
    topic: str
    checkpoints: tuple[ObjectCheckpoints, ...]

    def catch_up(self) -> None:
        """Wait until all rows written so far are at the mirror and in the topic, according to the syncs."""
        ts, until = self.source.cluster.pd.tso(), time.monotonic() + PATIENCE
        for each in self.checkpoints:
            while (found := each.load()) is None or found.checkpoint_ts < ts:
                assert time.monotonic() < until, f"the sync is at {found}, and should be at {ts}"
                for store_id in self.source.store_ids:  # or their cached timestamps would be waited for
                    self.source.flush(store_id)
                time.sleep(0.1)

    def sent(self) -> dict[bytes, bytes]:
        """The rows of someone who has applied the topic."""
        events = open_events(self.broker.messages(self.topic))
        check_resolved(events)
        return live_rows(events, time.time())


@contextlib.contextmanager
def clusters() -> Iterator[Clusters]:
    """Three empty clusters, a topic, and the syncs."""
    quick = {"election_timeout": 0.5, "resolved_ts_interval": 0.1, "ts_ahead": 0.3, "pd_members": 3}
    with (
        tempfile.TemporaryDirectory(prefix="cluster-seeds-") as name,
        live_cluster(Path(name, "source"), ApiVersion.V2, stores=4, **quick) as source,
        live_cluster(Path(name, "target"), ApiVersion.V2, stores=4, **quick) as target,
        live_cluster(Path(name, "mirror"), ApiVersion.V2, stores=1, **quick) as mirror,
        kafka_broker() as broker,
        contextlib.ExitStack() as syncs,
    ):
        topic, checkpoints = broker.create_topic(partitions=2), list[ObjectCheckpoints]()
        kafka = f"kafka://{broker.address}/{topic}?protocol=open-protocol"
        for sink, sync in ((f"tikv://{mirror.pd}", "mirror"), (kafka, "topic")):
            folder = Path(name, f"sync-to-{sync}")
            syncs.enter_context(syncing(source, sink, folder, "--hold-back", HOLD_BACK, "--id", sync))
            checkpoints.append(ObjectCheckpoints(open_store(parse(f"local://{folder}/state")), sync))
        yield Clusters(source, target, mirror, broker, topic, tuple(checkpoints))


def run_seed(clusters: Clusters, seed: int) -> Tally:
    """Do every job under trouble, and see in peace that all is as it should be."""
    tally = Tally()
    rows = {key_of(number): b"%d of seed %d" % (number, seed) for number in range(KEYS)}
    clusters.source.raw()  # known before its PD has no leader: who makes the trouble asks it
    clusters.target.raw().delete_range(EVERY_KEY)
    gone = LONG_GONE if seed > QUICK and seed % LONG_EVERY == 0 else GONE
    pd_gone = PD_GONE if seed > QUICK and seed % LONG_EVERY == 1 else 0.0
    is_compared = seed > QUICK or seed % MIRROR_EVERY == 0
    lives = (clusters.source, clusters.target)
    troubles = [Trouble(live, (seed, at), gone, pd_gone) for at, live in enumerate(lives)]
    with tempfile.TemporaryDirectory(prefix="cluster-seed-") as folder:
        _write_rows(Path(folder, "rows.jsonl"), rows)
        _write_rows(Path(folder, "later.jsonl"), dict.fromkeys(list(rows)[::3], b"lost by a mistake"))
        try:
            for trouble in troubles:
                trouble.step()  # a quick machine may have done all jobs before the next one
            with Background([(trouble.step, PAUSE if seed > QUICK else QUICK_PAUSE) for trouble in troubles]):
                _do_all(clusters, seed, Path(folder), tally, undo=is_compared)
        finally:
            for live in (clusters.source, clusters.target):
                live.heal()
        found = command("verify", "--storage", f"local://{folder}/backup", "--level", "data", "--executor", "driver")
        assert not found.code, f"the backup is not what its command said: {found.error}"
    if is_compared:
        clusters.catch_up()
        assert clusters.sent() == rows, "the topic does not have what was written"
    for live in (clusters.source, clusters.target, *([clusters.mirror] if is_compared else [])):
        assert contents(live) == rows, f"{live.pd} does not hold what was written"
        live.assert_innocent()
    tally.faults = sum((trouble.done for trouble in troubles), Counter())
    tally.operations = tally.faults.total()
    return tally


def _do_all(clusters: Clusters, seed: int, folder: Path, tally: Tally, *, undo: bool) -> None:
    """One after the other; engine and mode take turns with the seeds. With `undo` the source is restored to its backup, too."""
    engine, mode = ("scan", "store")[seed % 2], ("ingest", "put")[seed // 2 % 2]
    source, target = ("--pd", clusters.source.pd), ("--pd", clusters.target.pd)
    place, here = ("--storage", f"local://{folder}/backup"), ("--executor", "driver")

    def do(name: str, *arguments: str) -> list[dict[str, object]]:
        return tally.insist(name, *arguments, allowed=AGAIN).lines

    do("load", "raw", "import", str(folder / "rows.jsonl"), *source)
    [counted] = do("checksum", "raw", "checksum", *source)
    assert counted["total_kvs"] == KEYS, f"a checksum counts {counted}"
    do(f"backup {engine}", "backup", "raw", *place, *source, "--engine", engine, "--safe-interval", "0s", *here)
    do("verify", "verify", *place, "--level", "restore", *source, *here)
    do(f"restore {mode}", "restore", "raw", *place, *target, "--mode", mode, *here)
    do("diff", "diff", *source, "--other-pd", clusters.target.pd, *here)
    if undo:
        do("load", "raw", "load", str(folder / "later.jsonl"), *source)
        do("undo", "restore", "raw", *place, *source, "--allow-overwrite", *here)


def _write_rows(path: Path, rows: dict[bytes, bytes]) -> None:
    path.write_text("".join(f"{json.dumps({'key': key.hex(), 'value': value.hex()})}\n" for key, value in rows.items()))
