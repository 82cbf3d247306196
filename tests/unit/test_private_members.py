"""Private members of libraries: those of docs/adr/0024-private-members-of-libraries.md and no others, each as the code expects it."""

from __future__ import annotations

import re
import tomllib

import numba
import pytest

from tests.support.tools import ROOT

ADR = ROOT / "docs" / "adr" / "0024-private-members-of-libraries.md"
OURS = {"_free", "_outer", "_record_failure", "_seconds_left", "_spent_error"}
"""Of `tikv_br.retry`, used by another object of the same class."""
CONSTANTS = {"_PARTITION_EOF"}
"""Public in the documentation of confluent-kafka."""


def test_no_other_private_member_is_used() -> None:
    """Ruff lets pass what a comment allows: each such line names a member of the table."""
    used = set()
    for folder in ("tikv_br", "incremental", "formats"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if "SLF001" in line:
                    used |= set(re.findall(r"(?<!self)\.(_[A-Za-z]\w*)", line))
    assert "_cache" in used
    assert used - OURS - CONSTANTS <= set(re.findall(r"\b(_\w+)`", ADR.read_text(encoding="utf-8")))


def test_numba_has_the_cache_that_is_guarded() -> None:
    """`tikv_br.formats.jit` replaces two of its methods and reads its path."""

    @numba.njit(cache=True)
    def double(number: int) -> int:
        return number + number

    cache = double._cache  # type: ignore[attr-defined]
    assert isinstance(cache.cache_path, str)
    assert callable(cache.load_overload)
    assert callable(cache.save_overload)


def test_pyspark_has_what_a_session_forgets() -> None:
    """`tikv_br.tasks.session` sets them to None, as a process has them before its first session."""
    from pyspark import SparkContext

    for name in ("_gateway", "_jvm", "_active_spark_context"):
        assert hasattr(SparkContext, name)


@pytest.mark.parametrize("package", ["numba", "obstore", "pyspark"])
def test_their_packages_have_upper_bounds(package: str) -> None:
    """A release that nobody has tried is not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["full"]]
    [found] = [each for each in required if re.match(rf"{package}\W", each)]
    assert "<" in found
