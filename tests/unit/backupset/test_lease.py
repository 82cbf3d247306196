"""A path is one run's alone: whatever dies, sleeps, races or is broken."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.faulty_store import FaultyStore
from tests.support.waiting import eventually
from tikv_br import records
from tikv_br.backupset import layout, lease
from tikv_br.backupset.lease import (
    GRACE_SECONDS,
    TTL_SECONDS,
    Lease,
    LeaseOwner,
    PathLease,
    acquire,
    break_lease,
    newest,
    ttl_of,
)
from tikv_br.errors import (
    BackupDamaged,
    LeaseHeld,
    LeaseLost,
    StorageError,
    StorageUnreachable,
    TikvBrError,
    UsageError,
)
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.outage import StorageAway
from tikv_br.storage.url import CloudFlags, S3Options, parse

OFTEN = 0.03
"""Seconds between renewals of a lease that is to be renewed within a test."""
ELSEWHERE = LeaseOwner("elsewhere", "another machine", 1, 1)


def leave(store: ObjectStore, owner: LeaseOwner, seconds: float, number: int = 1, ahead: float = 0.0) -> None:
    """Leave a lease of another that ends in so many seconds, by a clock that is ``ahead`` of the storage's."""
    left = Lease("f" * 16, owner, "0123abcd", "backup", int((time.time() + seconds + ahead) * 1000))
    store.put(layout.lease_name(number), records.dump(left))
    created = time.time() + seconds - TTL_SECONDS
    os.utime(Path(store.location.path, layout.lease_name(number)), (created, created))


def until_lost(held: PathLease, kind: type[TikvBrError] = LeaseLost) -> TikvBrError:
    """Wait for the loss of a lease."""
    eventually(lambda: held.lost is not None)
    with pytest.raises(kind) as raised:
        held.check()
    return raised.value


def test_path_is_held_by_one(store: ObjectStore) -> None:
    """A second run gets an error that names the holder; after the release the path is free and nothing remains."""
    with acquire(store, "backup") as held:
        held.check()
        with pytest.raises(LeaseHeld, match=rf"backup by process {os.getpid()} on .*, expires in \d+ s unless renewed"):
            acquire(store, "backup")
        with pytest.raises(LeaseHeld):
            lease.check_free(store)
    assert list(store.list()) == []
    acquire(store, "backup").release()


def test_root_of_the_file_system_is_no_path() -> None:
    """A backup there would list /proc and everything else; listing the backups below it is allowed."""
    with pytest.raises(UsageError, match="cannot be the path"):
        lease.check_free(open_store(parse("/")))


def test_one_of_many_gets_a_path(store: ObjectStore) -> None:
    """However many begin at once, at a path that is free or whose lease is over, one gets it."""
    for _round in range(5):

        def begin(_number: int) -> PathLease | None:
            try:
                return acquire(store, "backup")
            except LeaseHeld:
                return None

        with ThreadPoolExecutor(6) as pool:
            taken = [held for held in pool.map(begin, range(6)) if held is not None]
        assert len(taken) == 1
        taken[0].release()
        leave(store, ELSEWHERE, -60)


def test_waiting_run_gets_the_path_when_it_is_given_back(store: ObjectStore) -> None:
    """The message names the holder, once."""
    reported: list[str] = []
    held = acquire(store, "backup")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acquire, store, "prune", wait=60, on_wait=reported.append)
        eventually(lambda: bool(reported))
        assert not waiting.done()
        held.release()
        waiting.result().release()
    assert len(reported) == 1


def test_lease_is_renewed_and_old_numbers_go(store: ObjectStore) -> None:
    """It outlives its time many times over, and holds few objects."""
    with acquire(store, "backup", renew_every=OFTEN) as held:
        eventually(lambda: newest(store).number > 3 * lease.KEPT)
        held.check()
        assert len(list(store.list(layout.LEASE))) <= lease.KEPT + 2
    assert list(store.list()) == []


@pytest.mark.parametrize(("seconds", "free"), [(20, False), (-GRACE_SECONDS / 10, False), (-60, True)])
def test_lease_of_another_machine_ends_by_the_clock(store: ObjectStore, seconds: float, free: bool) -> None:
    """A while after its end, for clocks differ."""
    leave(store, ELSEWHERE, seconds, number=7)
    if free:
        with acquire(store, "backup"):
            assert newest(store).number == 8
    else:
        with pytest.raises(LeaseHeld, match=r"backup by process 1 on elsewhere \(run 0123abcd\)"):
            acquire(store, "backup")


@pytest.mark.parametrize(("seconds", "ahead", "free"), [(20, -7200, False), (-5, -7200, False), (-60, -7200, True)])
def test_lease_of_a_machine_whose_clock_is_behind(store: ObjectStore, seconds: float, ahead: float, free: bool) -> None:
    """Two hours behind, which is the same as ours two hours ahead: the storage's clock says that it is held."""
    leave(store, ELSEWHERE, seconds, ahead=ahead)
    assert newest(store).is_free is free
    assert [info.name for info in store.list()] == [layout.lease_name(1)]


def test_lease_of_a_machine_whose_clock_is_ahead(store: ObjectStore) -> None:
    """It is kept longer, never less long; --force breaks it."""
    leave(store, ELSEWHERE, -60, ahead=7200)
    assert not newest(store).is_free
    assert break_lease(store, force=True) is not None
    assert newest(store).is_free


def test_lease_of_a_dead_process_is_over_at_once(store: ObjectStore) -> None:
    """On the same machine nobody waits for a process that has ended, even if its pid was reused."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        started = int(stat.rpartition(")")[2].split()[19])
        owner = replace(LeaseOwner.this_process(), pid=child.pid, started=started)
        leave(store, owner, 20)
        assert not newest(store).is_free
        assert replace(owner, started=started - 1).is_gone
        child.kill()
    assert newest(store).is_free


def test_own_process_may_have_left_one(store: ObjectStore) -> None:
    """A lease that an earlier command of this process could not remove blocks nobody."""
    leave(store, LeaseOwner.this_process(), 20)
    acquire(store, "backup").release()


def test_broken_lease_is_lost(store: ObjectStore) -> None:
    """Only by force; its holder stops, removes nothing, and the next run gets the path."""
    with acquire(store, "backup", renew_every=OFTEN) as held:
        with pytest.raises(LeaseHeld, match="belongs to a live run") as refused:
            break_lease(store)
        assert refused.value.hint is not None
        assert "--force" in refused.value.hint
        broken = break_lease(store, force=True)
        assert broken is not None
        assert broken.owner == LeaseOwner.this_process()
        assert "broken by `tikv-br backup unlock`" in until_lost(held).message
        with acquire(store, "backup") as other:
            held.release()
            other.check()
            assert not newest(store).is_free


@pytest.mark.parametrize("data", [b"", b"{}"])
def test_damage_at_the_end_is_a_warning(store: ObjectStore, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Work that is done stays done where its lease does not read any more: it is left alone, for it may be another's, and named."""
    with acquire(store, "backup") as held:
        name = layout.lease_name(newest(store).number)
        store.put(name, data)
    assert [info.name for info in store.list()] == [name]
    assert name in caplog.text
    assert "delete it with the storage's own tools" in caplog.text
    with pytest.raises(BackupDamaged):
        held.release()


def test_a_storage_that_fails_at_the_end_is_a_warning(store: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    """The lease expires."""
    held = acquire(FaultyStore(store, "..b"), "backup")
    assert not held.try_release()
    assert newest(store).lease is not None
    assert "stays until it expires" in caplog.text


def test_lease_that_is_over_is_broken_without_force(store: ObjectStore) -> None:
    """Nothing to break is no error."""
    assert break_lease(store) is None
    leave(store, ELSEWHERE, -60)
    broken = break_lease(store)
    assert broken is not None
    assert broken.owner == ELSEWHERE


def test_takeover_is_noticed_by_who_slept(store: ObjectStore) -> None:
    """A holder whose number another has created has lost, and says to whom."""
    with acquire(store, "backup", renew_every=OFTEN) as held:
        leave(store, ELSEWHERE, 20, number=newest(store).number + 300)  # ahead of the next renewals
        assert "elsewhere" in until_lost(held).message
    assert newest(store).lease is not None


def test_takeover_that_is_over_is_noticed(store: ObjectStore) -> None:
    """A process that slept during another's whole run, which left the path free, does not own the path."""
    held = acquire(store, "backup")
    break_lease(store, force=True)
    acquire(store, "backup").release()
    with acquire(store, "prune") as present:
        held.release()
        present.confirm()

    slept = acquire(store, "backup")
    break_lease(store, force=True)
    acquire(store, "backup").release()
    with pytest.raises(LeaseLost, match="another run took it over and has ended"):
        slept.confirm()
    slept.release()
    assert list(store.list()) == []


class _AbsentStore(FaultyStore):
    """A storage that goes away."""

    gone = False
    problem: TikvBrError = StorageUnreachable("away")

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Fail once it is gone."""
        if self.gone:
            raise self.problem
        return super().put_if_absent(name, data)


def test_lease_that_cannot_be_renewed_ends_in_time(store: ObjectStore) -> None:
    """Before anyone else may take it, its holder knows, and blames the storage that was away."""
    absent = _AbsentStore(store, "")
    with acquire(absent, "backup", renew_every=OFTEN) as held:
        absent.gone = True
        eventually(lambda: held._failure is not None)
        held.check()
        held._held_until = time.monotonic()  # as when its time has passed
        assert until_lost(held, StorageUnreachable).message.endswith("within its TTL of 30 s: away")


def test_lease_that_slept_is_lost(store: ObjectStore) -> None:
    """A storage that has not failed since the last renewal is not to blame."""
    held = acquire(store, "backup")
    held._held_until = time.monotonic()
    with pytest.raises(LeaseLost, match="this process or machine was suspended"):
        held.check()


def test_a_storage_that_is_given_up_ends_the_lease_at_once(store: ObjectStore) -> None:
    """Its client has ridden out all that was to be ridden out."""
    absent = _AbsentStore(store, "")
    absent.problem = StorageAway("away; gave up after 60 s")
    held = acquire(absent, "backup", renew_every=OFTEN)
    absent.gone = True
    assert until_lost(held, StorageAway).exit_code == 20
    assert held.try_release()


def test_a_lease_on_s3_outlives_the_outages_that_are_ridden_out() -> None:
    """Else the end of such an outage would find it lost."""
    url = "s3://bucket/p?endpoint=http://127.0.0.1:1&region=r&access-key=a&secret-access-key=s"
    assert ttl_of(open_store(parse(url, CloudFlags(S3Options(patience=60))))) >= 60 + 3 * lease.RENEW_SECONDS


def test_a_failure_is_told_though_the_lease_cannot_be_given_back(store: ObjectStore) -> None:
    """The error of the work counts; without one, the error of the remaining lease."""
    with pytest.raises(KeyError), acquire(FaultyStore(store, "..b"), "backup"):
        raise KeyError
    with pytest.raises(StorageUnreachable), acquire(FaultyStore(store, "..b"), "backup"):
        pass


@pytest.mark.parametrize("sign", ["a", "b", "ba", "bbb", ".a", ".bb"])
def test_lost_answer_to_an_acquisition_is_no_loss(store: ObjectStore, sign: str) -> None:
    """The first number is there and ours, or is created by a later request; so is the proof that conditions are kept."""
    with acquire(FaultyStore(store, sign), "backup") as held:
        held.check()
        assert newest(store).number == 1


def test_lost_answer_to_a_renewal_is_no_loss(store: ObjectStore) -> None:
    """The object is there and ours, though the storage said nothing."""
    with acquire(FaultyStore(store, "..a.a"), "backup", renew_every=OFTEN) as held:
        eventually(lambda: newest(store).number >= 5)
        held.check()


def test_old_view_of_a_path_takes_nothing(store: ObjectStore) -> None:
    """A run that saw an expired lease, but was overtaken by a whole other run, withdraws."""
    leave(store, ELSEWHERE, -60)
    seen = newest(store)
    store.delete(layout.lease_name(1))
    with acquire(store, "backup") as held:
        assert lease._claim(store, seen, "backup", 30) is None
        assert newest(store).number == 1
        held.check()


class _CarelessStore(FaultyStore):
    """A server that ignores If-None-Match, as some S3 servers do."""

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Overwrite."""
        return self.put(name, data)


def test_storage_without_conditional_writes_is_refused(store: ObjectStore) -> None:
    """The error comes before any file is written, and nothing remains."""
    with pytest.raises(StorageError, match="ignores conditional writes"):
        acquire(_CarelessStore(store, ""), "backup")
    assert list(store.list()) == []
