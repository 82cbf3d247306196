"""The default executor."""

from __future__ import annotations

import pytest

from tikv_br.errors import SparkUnavailable
from tikv_br.tasks import session
from tikv_br.tasks.executor import MIN_SPARK_TASKS, choose_executor


def test_steering_stays_here_below_some_thousand_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` takes Spark for many tasks only, and never where it could not start."""
    assert choose_executor(MIN_SPARK_TASKS - 1) == "driver"
    monkeypatch.setattr(session, "check_java", lambda: 17)
    assert choose_executor(MIN_SPARK_TASKS) == "spark"

    def no_java() -> int:
        raise SparkUnavailable("no Java")

    monkeypatch.setattr(session, "check_java", no_java)
    assert choose_executor(MIN_SPARK_TASKS) == "driver"
