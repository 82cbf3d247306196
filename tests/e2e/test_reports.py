"""``--report FILE`` of backup, restore, verify and diff: the page in a browser, and the JSON, of what worked and of what failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.cli.main import run
from tikv_br.formats.api_version import ApiVersion

KEYS = 400
PLOTS = "[...document.querySelectorAll('svg[data-plot]')].map(plot => plot.dataset.plot)"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V1 cluster with some rows."""
    with live_cluster(tmp_path_factory.mktemp("v1"), ApiVersion.V1, stores=1) as running:
        running.raw().batch_put({b"key%05d" % number: b"value" * 20 for number in range(KEYS)})
        running.split(b"key00100")
        yield running


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run an empty V1 cluster."""
    with live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V1, stores=1) as running:
        yield running


def ended(code: int, *arguments: str, report: Path) -> dict[str, Any]:
    """Run a command that ends with ``code``, and return its report's JSON."""
    assert run([*arguments, "--report", str(report)]) == code
    found: dict[str, Any] = json.loads(report.with_suffix(".json").read_text())
    assert found["exit_code"] == code
    return found


def seen(page: Page, report: Path) -> str:
    """Return what a reader of the page sees; nothing is fetched and nothing complains."""
    page.go(report.as_uri())
    page.wait("document.readyState === 'complete'")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    return page.text()


def test_a_backup_and_all_that_is_done_with_it_are_reported(
    live: LiveCluster, target: LiveCluster, page: Page, tmp_path: Path
) -> None:
    """Each page has verdict, steps, map and comparison; the report of a refused restore has the reason."""
    place, report = f"local://{tmp_path}/backup", tmp_path / "report.html"

    ended(0, "backup", "raw", "--pd", live.pd, "-s", place, "--dry-run", report=report)
    assert "This was a dry run: nothing was changed." in seen(page, report)
    made = ended(0, "backup", "raw", "--pd", live.pd, "-s", place, "--checksum", "--executor", "driver", report=report)
    assert made["summary"]["total_kvs"] == KEYS == sum(cell["keys"] for cell in made["keyspace_map"])
    text = seen(page, report)
    assert "backup raw: passed" in text
    assert "The backup is complete." in text
    assert f"Cluster: {live.pd}" in text
    assert "the backup with the source" in text
    assert {"timeline", "map"} <= set(page.value(PLOTS))
    assert [cell["regions"] for cell in made["keyspace_map"]] == [1, 1]
    assert "by the 2 regions of the source" in text

    ended(30, "backup", "raw", "--pd", live.pd, "-s", place, "--executor", "driver", report=report)
    text = seen(page, report)
    assert "The backup did not complete." in text
    assert "Map of the keyspace" not in text  # the backup there is another run's

    flags = ("--pd", target.pd, "-s", place, "--executor", "driver")
    brought = ended(0, "restore", "raw", *flags, report=report)
    assert brought["compared"][-1]["keys"] == KEYS
    assert brought["keyspace_map"] == made["keyspace_map"]
    assert "restore raw: passed" in seen(page, report)
    target.raw().put(b"key00000", b"changed since")
    refused = ended(40, "restore", "raw", *flags, report=report)
    assert (refused["verdict"], refused["trouble"]["step"]) == ("failed", "check the target")
    assert [each["name"] for each in refused["phases"] if not each["ended_well"]] == ["check the target"]
    text = seen(page, report)
    assert "restore raw: failed" in text
    assert refused["trouble"]["message"] in text
    assert refused["trouble"]["hint"] in text
    assert page.value("document.querySelectorAll('[data-plot=timeline] .broken').length") == 1
    target.raw().put(b"key00000", b"value" * 20)

    compare = ("diff", "--pd", live.pd, "--other-pd", target.pd, "--executor", "driver")
    ended(0, *compare, report=report)
    assert "Both sides are equal." in seen(page, report)
    target.raw().put(b"<script>complain()</script>", b"")
    different = ended(60, *compare, report=report)
    assert different["findings"][0]["cause"] == "1 only in B"
    text = seen(page, report)
    assert "diff: failed" in text
    assert "The two sides differ." in text
    target.raw().delete(b"<script>complain()</script>")

    ended(0, "verify", place, "--level", "data", report=report)
    assert "All checks passed." in seen(page, report)
    victim = min((tmp_path / "backup").rglob("*.sst"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    broken = ended(32, "verify", place, report=report)
    assert victim.name in broken["findings"][0]["object"]
    text = seen(page, report)
    assert "verify: failed" in text
    assert "Damage was found." in text
    assert victim.name in text
    assert {path.name for path in tmp_path.iterdir()} - {"tikv-br-index"} == {"backup", "report.html", "report.json"}
