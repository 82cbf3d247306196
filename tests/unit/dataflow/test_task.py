"""Attempts of a task: which errors get another one."""

from __future__ import annotations

import time

import pytest

from tikv_br.dataflow import write
from tikv_br.dataflow.write import TaskResult, try_task
from tikv_br.errors import ClusterUnreachable, RetryBudgetExhausted, StorageDenied, TikvBrError
from tikv_br.storage.outage import StorageAway
from tikv_br.tasks.task import TaskContext


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (ClusterUnreachable("a lost connection"), write.ATTEMPTS),
        (RetryBudgetExhausted("gave up after 20 s"), 1),
        (StorageAway("gave up after 60 s"), 1),
        (StorageDenied("no right"), 1),
    ],
)
def test_a_spent_budget_is_not_spent_again(error: TikvBrError, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a call's 20 s would become a minute, with a third of it in the message."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    made = 0

    def attempt() -> TaskResult:
        nonlocal made
        made += 1
        raise error

    with pytest.raises(type(error)):
        try_task(TaskContext(0, 0, lambda _: None), attempt)
    assert made == attempts
    assert len(pauses) == attempts - 1
    assert all(pause > 0.1 for pause in pauses)
