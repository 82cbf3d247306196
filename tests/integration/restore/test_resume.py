"""Restores that end before their end, and the same command again."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.integration.restore.restores import THREADS, WARM, break_off, leftovers, options_of, run_restore
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster
from tests.support.waiting import eventually
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.errors import (
    BackupDamaged,
    ChecksumMismatch,
    LeaseHeld,
    ResumeRefused,
    StorageReadOnly,
    TargetNotEmpty,
)
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.progress_events import Event, Notice
from tikv_br.restore.options import Mode, Restamp
from tikv_br.restore.record import RestoreCheckpoint, remove_all
from tikv_br.restore.run import abort_restores, restore
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

KILLS = 20


@pytest.mark.timeout(600)
def test_a_restore_killed_at_any_moment_goes_on(source: StorageLocation, target: LiveCluster) -> None:
    """SIGKILL at twenty random moments: the same command again brings what is missing, once, and leaves nothing behind."""
    seed = int(os.environ.get("TIKV_BR_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    chance = random.Random(seed)
    options = options_of(target, source)
    slow = target.fail("Ingest", {"delay": {"seconds": 0.01}}, count=-1)
    with Forks(*WARM) as forks:
        for _warm in (False, True):
            before, began = target.hits(slow), time.monotonic()
            forks.start(partial(run_restore, options))
            assert forks.wait() == 0
            seconds, once = time.monotonic() - began, target.hits(slow) - before
            _check_and_empty(target, source)
        kills = 0
        while kills < KILLS:
            before, here, code = target.hits(slow), 0, -signal.SIGKILL
            while code:
                pid = forks.start(partial(run_restore, options))
                if kills + here < KILLS and (not here or chance.random() < 0.6):
                    time.sleep(chance.uniform(0, seconds))
                    with contextlib.suppress(ProcessLookupError):  # it has ended before
                        os.kill(pid, signal.SIGKILL)
                code = forks.wait()
                assert code in {0, -signal.SIGKILL}
                here += code != 0
            _check_and_empty(target, source)
            assert target.hits(slow) - before <= once + here * THREADS
            kills += here


def _check_and_empty(live: LiveCluster, location: StorageLocation) -> None:
    """Check that all rows are there and no trace of the restore is, and make room for the next."""
    assert rows_of(live) == ROWS
    assert live.raw().checksum().total_kvs == len(ROWS)
    assert leftovers(location) == []
    live.raw().delete_range(EVERY_KEY)


@pytest.mark.core("resume")
def test_only_what_is_missing_is_brought_in(source: StorageLocation, target: LiveCluster) -> None:
    """After SIGTERM the summary counts the rows already there, and the target's rows are no reason to refuse."""
    break_off(target, source)
    ingests = target.fail("Ingest", {"delay": {"seconds": 0}}, count=-1)
    notices: list[Event] = []
    summary = restore(options_of(target, source), notices.append)
    assert FILES // 2 <= summary.resumed_files < summary.files
    assert target.hits(ingests) <= summary.files - summary.resumed_files + THREADS
    assert any(isinstance(event, Notice) and "resuming the restore" in event.message for event in notices)
    assert summary.verified
    assert rows_of(target) == ROWS
    assert leftovers(source) == []


def test_a_foreign_key_where_no_file_was_to_come_is_refused(source: StorageLocation, target: LiveCluster) -> None:
    """Rows that the unfinished restore cannot have written are foreign, also when a restore resumes."""
    break_off(target, source, span=KeyRange(b"prefix", b""))
    target.raw().put(b"a", b"not of the backup")
    with pytest.raises(TargetNotEmpty, match=r'first key there is "a" \(hex:61\)'):
        restore(options_of(target, source))
    assert restore(options_of(target, source, span=KeyRange(b"prefix", b""))).verified


def test_another_range_goes_on_as_well(source: StorageLocation, target: LiveCluster) -> None:
    """Finished parts are known by their keys: a wider range ingests the rest, and rows removed since are missing."""
    break_off(target, source, span=KeyRange(b"prefix", b""))
    summary = restore(options_of(target, source))
    assert summary.resumed_files > 3
    assert rows_of(target) == ROWS
    target.raw().delete_range(EVERY_KEY)
    break_off(target, source)
    target.raw().delete_range(EVERY_KEY)
    with pytest.raises(ChecksumMismatch) as raised:
        restore(options_of(target, source))
    assert "The same command restores all rows again" in raised.value.hint
    assert restore(options_of(target, source)).verified
    assert rows_of(target) == ROWS
    assert leftovers(source) == []


def test_a_record_that_does_not_read_is_no_fault_of_the_backup(source: StorageLocation, target: LiveCluster) -> None:
    """It is said which object, and how to go on without it."""
    break_off(target, source)
    store = open_store(source)
    begun = next(name for name in leftovers(source) if name.endswith("begun.json"))
    store.put(begun, b"{}")
    with pytest.raises(BackupDamaged, match="begun") as raised:
        restore(options_of(target, source))
    assert "--no-resume" in raised.value.hint
    assert restore(options_of(target, source, resume=False, allow_overwrite=True)).verified


def forge(source: StorageLocation, name: str, **changes: object) -> None:
    """Change a checkpoint as one can who may write beside the backup."""
    store = open_store(source)
    found = read_record(store, RestoreCheckpoint, name)
    write_record(store, name, structs.replace(found, **changes))


def checkpoint_of(source: StorageLocation) -> str:
    """The name of the only checkpoint."""
    return next(name for name in leftovers(source) if name.endswith("begun.json"))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_forged_checkpoint_does_not_open_a_full_target(
    source: StorageLocation, target: LiveCluster, mode: Mode
) -> None:
    """Without the mark of its restore in the cluster, or with a guess, the target must be empty; no row is overwritten."""
    break_off(target, source, (mode is Mode.PUT and "RawBatchPut") or "Ingest", mode=mode)
    name = checkpoint_of(source)
    target.raw().delete_range(EVERY_KEY)
    theirs = dict.fromkeys(sorted(ROWS)[::40], b"theirs")
    target.raw().batch_put(theirs)
    for secret in ("", "0" * 32):
        forge(source, name, secret=secret)
        notices: list[Event] = []
        with pytest.raises(TargetNotEmpty):
            restore(options_of(target, source, mode=mode), notices.append)
        assert any(isinstance(each, Notice) and "does not have its mark" in each.message for each in notices)
        assert rows_of(target) == theirs
    again = options_of(target, source, mode=mode, allow_overwrite=True, restamp=Restamp.ALWAYS)
    assert restore(again).resumed_files == 0
    assert rows_of(target) == ROWS
    assert leftovers(source) == []


def test_a_checkpoint_does_not_widen_what_was_empty(source: StorageLocation, target: LiveCluster) -> None:
    """The ranges that may hold rows of the restore, and the new timestamp, are those of the mark."""
    break_off(target, source, span=KeyRange(b"prefix", b""))
    codec = target.raw().codec
    forge(source, checkpoint_of(source), empty=(codec.rpc_range(),), restamp_ts=1 << 62)
    target.raw().put(b"a", b"not of the backup")
    with pytest.raises(TargetNotEmpty, match=r'first key there is "a" \(hex:61\)'):
        restore(options_of(target, source))
    summary = restore(options_of(target, source, span=KeyRange(b"prefix", b"")))
    assert summary.resumed_files
    assert summary.restamp_ts == 0


def test_a_checkpoint_that_comes_back_is_nobodys(source: StorageLocation, target: LiveCluster) -> None:
    """The mark goes at the end of the restore, so that its checkpoint, kept by somebody, is worth nothing in the cluster then."""
    break_off(target, source)
    store, name = open_store(source), checkpoint_of(source)
    kept = store.get(name)
    assert restore(options_of(target, source)).resumed_files
    target.raw().put(min(ROWS), b"written since")
    store.put(name, kept)
    with pytest.raises(TargetNotEmpty):
        restore(options_of(target, source))
    assert target.raw().get(min(ROWS)) == b"written since"
    assert abort_restores(source, target.config).forgotten_restores == 1


def test_no_resume_begins_anew(source: StorageLocation, target: LiveCluster) -> None:
    """--no-resume takes the rows of the unfinished restore for what others wrote, and does all of it again."""
    break_off(target, source)
    with pytest.raises(TargetNotEmpty):
        restore(options_of(target, source, resume=False))
    summary = restore(options_of(target, source, resume=False, allow_overwrite=True))
    assert summary.resumed_files == 0
    assert rows_of(target) == ROWS
    assert leftovers(source) == []


def test_records_elsewhere_serve_as_well(source: StorageLocation, target: LiveCluster, tmp_path: Path) -> None:
    """With --state nothing is written beside the backup, and the restore goes on from there."""
    state = parse(f"local://{tmp_path / 'state'}")
    break_off(target, source, state=state)
    assert leftovers(source) == []
    assert restore(options_of(target, source, state=state)).resumed_files
    assert leftovers(state) == []


def test_a_storage_that_cannot_be_written_is_said_and_no_obstacle(
    source: StorageLocation, target: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup is often read-only where it is restored: a notice names --state, and the rows come all the same."""

    def refuse(_store: LocalObjectStore, name: str, _data: bytes) -> None:
        raise StorageReadOnly(f"{name} cannot be written")

    monkeypatch.setattr(LocalObjectStore, "put", refuse)
    notices: list[Event] = []
    assert restore(options_of(target, source), notices.append).verified
    assert any(isinstance(event, Notice) and "--state" in event.message for event in notices)


def test_abort_can_forget_an_unfinished_restore(source: StorageLocation, target: LiveCluster) -> None:
    """Its records go, its rows stay: then they are foreign data."""
    break_off(target, source)
    store = open_store(source)
    assert remove_all(store) == 1
    assert remove_all(store) == 0
    assert leftovers(source) == []
    with pytest.raises(TargetNotEmpty):
        restore(options_of(target, source))


@pytest.mark.parametrize("changes", [{}, {"import_mode": True, "rate_limit": 1 << 20}, {"mode": Mode.PUT}], ids=str)
def test_a_target_that_holds_the_backup_is_left_alone(
    source: StorageLocation, target: LiveCluster, changes: dict[str, object]
) -> None:
    """As after a restore killed after its last change: the same command succeeds with a notice, and changes nothing."""
    files = restore(options_of(target, source)).files
    notices: list[Event] = []
    calls = [
        target.fail(rpc, {"delay": {"seconds": 0}}, count=-1)
        for rpc in ("Download", "Ingest", "RawBatchPut", "SwitchMode")
    ]
    summary = restore(options_of(target, source, **changes), notices.append)
    assert Notice("The target already holds this backup; nothing to do.") in notices
    assert (summary.files, summary.resumed_files, summary.verified) == (files, files, True)
    assert [target.hits(call) for call in calls] == [0, 0, 0, 0]
    assert rows_of(target) == ROWS
    assert leftovers(source) == []


def test_a_target_that_holds_more_or_less_than_the_backup_is_refused(
    source: StorageLocation, target: LiveCluster
) -> None:
    """One row more, one less, or another value: it is foreign data, also without checksums to compare."""
    restore(options_of(target, source))
    with pytest.raises(TargetNotEmpty):
        restore(options_of(target, source, checksum=False))
    pairs = itertools.combinations(sorted(ROWS)[:20], 2)  # of one file
    first, second = next(pair for pair in pairs if 0 < len(ROWS[pair[0]]) == len(ROWS[pair[1]]))
    target.raw().batch_put({key: bytes([ROWS[key][0] ^ 1]) + ROWS[key][1:] for key in (first, second)})
    with pytest.raises(TargetNotEmpty):  # the same change of two rows cancels in a checksum
        restore(options_of(target, source))
    target.raw().batch_put({key: ROWS[key] for key in (first, second)})
    target.raw().put(b"row00001x", b"foreign")
    with pytest.raises(TargetNotEmpty):
        restore(options_of(target, source))
    target.raw().delete(b"row00001x")
    target.raw().put(b"row00001", b"another value")
    with pytest.raises(TargetNotEmpty):
        restore(options_of(target, source))
    target.raw().delete(b"row00001")
    with pytest.raises(TargetNotEmpty):
        restore(options_of(target, source))


def test_two_at_once_are_told_apart(source: StorageLocation, target: LiveCluster) -> None:
    """The second is refused with a hint, or waits its turn, when it finds that all is done; another cluster is no matter."""
    slow = target.fail("Ingest", {"delay": {"seconds": 0.3}}, count=-1)
    with Forks(*WARM) as forks:
        pid = forks.start(partial(run_restore, options_of(target, source)))
        eventually(lambda: leftovers(source))
        os.kill(pid, signal.SIGSTOP)  # it is not to end before it has been met
        with pytest.raises(LeaseHeld, match="restore by") as raised:
            restore(options_of(target, source))
        assert "--lock-wait" in raised.value.hint
        with pytest.raises(LeaseHeld):
            remove_all(open_store(source))
        target.relent(slow)
        os.kill(pid, signal.SIGCONT)
        assert restore(options_of(target, source, lock_wait=120.0)).resumed_files >= FILES
        assert forks.wait() == 0
    assert rows_of(target) == ROWS


def test_a_resumed_restore_keeps_its_kind_of_timestamps(source: StorageLocation, target: LiveCluster) -> None:
    """Another --restamp is refused while files are left, and changes nothing; the options of the first run resume."""
    break_off(target, source, restamp=Restamp.NEVER)
    before = rows_of(target)
    with pytest.raises(ResumeRefused, match="restamp was never, is always"):
        restore(options_of(target, source, restamp=Restamp.ALWAYS))
    assert rows_of(target) == before
    assert restore(options_of(target, source, restamp=Restamp.NEVER, checksum=False)).resumed_files > 0
    assert rows_of(target) == ROWS
