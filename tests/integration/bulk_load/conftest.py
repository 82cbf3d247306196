"""The one session of the tests of bulk loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tikv_br.tasks.frames import sql_session

MASTER = "local[2]"


@pytest.fixture(scope="package")
def session() -> Iterator[SparkSession]:
    """Started once."""
    with sql_session(MASTER) as session:
        yield session
