"""A drill whose backup Spark makes."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from tests.integration.drill.conftest import ROWS, assert_nothing_left
from tikv_br.drill.options import DrillOptions
from tikv_br.drill.run import drill
from tikv_br.report.facts import DrillVerdict


def test_a_backup_of_spark_is_rehearsed(options: DrillOptions) -> None:
    """Spark's tasks read the rows of the backup that the drill makes."""
    assert options.backup is not None
    by_spark = structs.replace(options.backup, executor="spark", engine="scan", spark_master="local[1]")
    found = drill(replace(options, backup=by_spark))
    assert (found.verdict, found.value("keys")) == (DrillVerdict.PASSED, len(ROWS))
    assert_nothing_left(options)
