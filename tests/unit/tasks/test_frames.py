"""Spark SQL without Spark."""

from __future__ import annotations

import contextlib

import pytest
from py4j.protocol import Py4JError

from tikv_br.errors import SparkUnavailable
from tikv_br.tasks import frames


class DeadJvmError(Py4JError):  # type: ignore[misc]  # py4j has no types
    """An error whose text only the JVM knows."""

    def __str__(self) -> str:
        raise Py4JError("the JVM is gone")


def test_master_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark gives a context of a master that it could not reach, and stops it: no use of it works, and errors have no text."""

    def session(_context: object) -> None:
        raise DeadJvmError

    monkeypatch.setattr(frames, "spark_context", lambda *_given, **_named: contextlib.nullcontext())
    monkeypatch.setattr("pyspark.sql.SparkSession", session)
    with (
        pytest.raises(SparkUnavailable, match="cannot start Spark on spark://h:1") as refused,
        frames.sql_session("spark://h:1"),
    ):
        pass
    assert "can be reached" in refused.value.hint
