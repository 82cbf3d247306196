"""Which tests are taken to run on both kinds of clusters, told from their source."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tests.real.both import SETTINGS, Verdict, verdict
from tests.support.real_servers import Shape
from tikv_br.playground.settings import Settings

BEGIN = """
import pytest
from tests.support.live_cluster import LiveCluster, live_cluster

class Source:
    def __init__(self, live):
        self.live = live
    def break_it(self):
        self.live.fail("RawPut", {"drop": {}})
    def rows(self):
        return {}

@pytest.fixture
def live(tmp_path):
    with live_cluster(tmp_path, 1, stores=1) as live:
        yield live

@pytest.fixture
def behind(tmp_path):
    with live_cluster(tmp_path, 1, clock_ahead=-1) as live:
        yield live

@pytest.fixture
def source(live):
    return Source(live)

def helper(live: LiveCluster):
    return live.failing("RawPut", {"drop": {}})
"""


@pytest.mark.parametrize(
    ("test", "clusters", "reasons"),
    [
        ("def test(): pytest.fail('no')", False, set()),
        ("def test(live): live.split(b'x')", True, set()),
        ("def test(live): live.run('expire-import-mode', store_id=1)", True, {"the admin API of a playground"}),
        ("def test(live): helper(live)", True, {"failpoints"}),
        ("def test(source): source.rows()", True, set()),
        ("def test(source): source.break_it()", True, {"failpoints"}),
        ("def test(behind): behind.raw()", True, {"a clock of its own"}),
        ("@pytest.mark.usefixtures('behind')\ndef test(): pass", True, {"a clock of its own"}),
        ("def test(live): live.get('/playground/stores')", True, {"the admin API of a playground"}),
        ("def test(live): live.get('/pd/api/v1/stores')", True, set()),
        ("def test(live): assert pytest.fail and live.calls()", True, {"counts the calls of stores"}),
    ],
)
def test_a_test_needs_what_it_reaches(tmp_path: Path, test: str, *, clusters: bool, reasons: set[str]) -> None:
    """Through fixtures, functions, and methods that are called; type hints and other methods do not count."""
    path = tmp_path / "test_made.py"
    path.write_text(f"{BEGIN}\n\n{test}\n")
    found = verdict(path, "test")
    assert found == Verdict(clusters, frozenset(reasons))


def test_each_setting_is_one_of_real_servers_or_of_a_playground_only() -> None:
    """One that is neither would be passed to real servers, which do not have it."""
    ours, theirs = ({each.name for each in fields(kind)} for kind in (Settings, Shape))
    # Real PDs have an etcd anyway, and arguments of other functions have that name, too.
    assert ours - theirs - {"directory", "etcd"} == set(SETTINGS)
