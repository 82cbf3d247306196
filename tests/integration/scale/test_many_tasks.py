"""A thousand tasks in one Spark job."""

from __future__ import annotations

import os

import pytest

from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.tasks.task import TaskContext

TASKS = [KeyRange(b"%04d" % number, b"%04d" % (number + 1)) for number in range(1000)]


def identify(task: KeyRange, context: TaskContext) -> tuple[int, KeyRange, int]:
    """Return index, task and the worker's process id."""
    return context.index, task, os.getpid()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_tasks_arrive_each_once() -> None:
    """Each runs once with its own interval; the two workers are reused."""
    results: list[tuple[int, KeyRange, int]] = []
    run_tasks(
        TASKS, identify, options=ExecutorOptions(executor="spark", spark_master="local[2]"), on_result=results.append
    )
    assert [task for _, task, _ in sorted(results, key=lambda result: result[0])] == TASKS
    assert len({process for *_, process in results}) <= 4
