"""Tasks that a capture starts and ends according to etcd."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from tests.unit.incremental.group.memory_etcd import MemoryEtcd
from tests.unit.incremental.group.states import capture, changefeed
from tikv_br.cluster.etcd_values import created_at
from tikv_br.errors import ConversionUnsupported, SyncStateDamaged, TikvBrError
from tikv_br.incremental.group.capture import Tasks
from tikv_br.incremental.group.model import ChangefeedState, ChangefeedTask, Progress
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.group.worker import CaptureOptions, Membership, Worker
from tikv_br.records import dump

FEED = changefeed("feed")
TASK = ChangefeedTask("feed", 0, FEED.range.start, FEED.range.end, capture="one", epoch=1)


class Pool(Executor):
    """Threads that run nothing until the test ends them."""

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        """See `Executor`."""
        self.begun.append(Future())
        return self.begun[-1]


class Member:
    """A member of a group in which one task of one changefeed is its own."""

    def __init__(self) -> None:
        self.etcd = MemoryEtcd()
        self.store = GroupStore(self.etcd, 1)
        keys = self.store.keys
        present = created_at(keys.of("capture", "one"), self.etcd.put(keys.of("capture", "one"), dump(capture("one"))))
        self.etcd.put(keys.of("changefeed", "feed"), dump(FEED))
        self.etcd.put(keys.of("task", TASK.id), dump(TASK))
        self.pool = Pool()
        nothing = cast("Any", None)
        membership = Membership("one", self.store, nothing, nothing, present, CaptureOptions(Path(), lease=0))
        self.tasks = Tasks(membership, self.pool)
        self.tasks.update()

    @property
    def worker(self) -> Worker | None:
        """Current worker of the task."""
        return self.tasks._workers.get(TASK.id)

    def change(self, **changes: object) -> None:
        """Another process changes the changefeed."""
        found = self.store.snapshot().changefeeds["feed"]
        self.etcd.put(self.store.keys.of("changefeed", "feed"), dump(structs.replace(found, **cast("Any", changes))))

    def end(self, error: TikvBrError | None = None) -> None:
        """The thread begun last ends."""
        if error is None:
            self.pool.begun[-1].set_result(None)
        else:
            self.pool.begun[-1].set_exception(error)

    def is_told_to_stop(self) -> bool:
        """Whether the worker shall end."""
        return self.worker is not None and self.worker._stop.is_set()


@pytest.fixture
def member() -> Member:
    """One that has begun."""
    return Member()


def test_a_change_takes_effect_though_the_owner_missed_the_pause(member: Member) -> None:
    """A task paused, updated and resumed between two looks of the owner is restarted with the new settings."""
    member.change(concurrency=9)
    member.tasks.update()
    assert member.is_told_to_stop()
    member.end()
    member.tasks.update()
    assert member.worker is not None
    assert (member.worker.changefeed.concurrency, len(member.pool.begun)) == (9, 2)
    member.tasks.update()
    assert not member.is_told_to_stop()


def test_workers_stop_when_the_changefeed_is_paused(member: Member) -> None:
    """They do not wait for the owner to free the task, and do not resume before the changefeed does."""
    member.change(state=ChangefeedState.PAUSED)
    member.tasks.update()
    assert member.is_told_to_stop()
    member.end()
    member.tasks.update()
    member.tasks.update()
    assert (member.worker, len(member.pool.begun)) == (None, 1)
    member.change(state=ChangefeedState.NORMAL)
    member.tasks.update()
    assert (member.worker is not None, len(member.pool.begun)) == (True, 2)


@pytest.mark.parametrize("state", [ChangefeedState.PAUSED, ChangefeedState.REMOVING])
def test_a_failure_while_stopped_does_not_undo_the_pause(member: Member, state: ChangefeedState) -> None:
    """A paused changefeed stays paused, and one being removed goes."""
    member.change(state=state)
    member.end(ConversionUnsupported("the sink keeps no TTLs"))
    member.tasks.update()
    assert member.store.snapshot().changefeeds["feed"].state is state


def test_a_failed_task_is_not_restarted(member: Member) -> None:
    """A look with an older state starts nothing; the task's error stays."""
    assert member.worker is not None
    member.worker.checkpoints.claim()
    member.end(ConversionUnsupported("the sink keeps no TTLs"))
    member.tasks.update()
    member.tasks.update()
    state = member.store.snapshot()
    assert (state.changefeeds["feed"].state, len(member.pool.begun)) == (ChangefeedState.FAILED, 1)
    progress: Progress = state.progress[TASK.id]
    assert "keeps no TTLs" in progress.error


def test_a_damaged_value_ends_the_work_on_its_changefeed_only(member: Member) -> None:
    """The task of that changefeed is stopped, and let go of when it has ended; the member goes on, with what is sound."""
    task = member.store.keys.of("task", TASK.id)
    member.etcd.put(task, b"?")
    member.tasks.update()
    assert member.is_told_to_stop()
    member.end(SyncStateDamaged("etcd: a value of mine"))
    member.tasks.update()
    assert member.worker is None
    member.etcd.put(task, dump(replace(TASK, epoch=2)))
    member.tasks.update()
    assert member.worker is not None


def test_no_secret_is_kept_with_an_error(member: Member) -> None:
    """The error of a task is saved for others without secrets of a server's text."""
    member.end(ConversionUnsupported("PUT https://me:hidden@host/x?secret_access_key=hidden: refused"))
    member.tasks.update()
    kept = member.store.snapshot()
    reported = kept.changefeeds["feed"].error + "".join(each.error for each in kept.progress.values())
    assert "refused" in kept.changefeeds["feed"].error
    assert "hidden" not in reported
