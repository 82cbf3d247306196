"""A thousand tasks in one Spark job."""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest

from tikv_br.backup.task import Task
from tikv_br.spark.executor import ExecutorOptions, run_tasks
from tikv_br.spark.task import TaskContext

TASKS = [Task(b"%04d" % number, b"%04d" % (number + 1)) for number in range(1000)]


def look(task: Task, context: TaskContext) -> tuple[int, Task, int, int]:
    """Return what came, where to, and how many objects the garbage collection passes over there."""
    return context.index, task, os.getpid(), gc.get_freeze_count()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_tasks_arrive_each_once() -> None:
    """Each runs once with its own interval, in two workers that are used again and do not collect what they have loaded."""
    results: list[tuple[int, Task, int, int]] = []
    run_tasks(TASKS, look, options=ExecutorOptions("spark", "local[2]"), on_result=results.append)
    assert [task for _, task, *_ in sorted(results, key=lambda result: result[0])] == TASKS
    tasks_of = Counter(process for *_, process, _ in results)
    assert len(tasks_of) <= 4
    unspared = [process for *_, process, frozen in results if frozen < 10_000]
    assert Counter(unspared) == dict.fromkeys(tasks_of, 1)
