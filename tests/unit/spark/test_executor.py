"""Where tasks run when nobody says it."""

from __future__ import annotations

import pytest

from tikv_br.errors import SparkUnavailable
from tikv_br.spark import session
from tikv_br.spark.executor import STEERING_TASKS, for_steering


def test_steering_stays_here_below_some_thousand_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` takes Spark for many tasks only, and never where it could not start."""
    assert for_steering(STEERING_TASKS - 1) == "driver"
    monkeypatch.setattr(session, "check_java", lambda: 17)
    assert for_steering(STEERING_TASKS) == "spark"

    def no_java() -> int:
        raise SparkUnavailable("no Java")

    monkeypatch.setattr(session, "check_java", no_java)
    assert for_steering(STEERING_TASKS) == "driver"
