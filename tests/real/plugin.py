"""``pytest -p tests.real.plugin``: run the tests that run on both kinds of clusters, and end with a table of them by feature.

tests/real/expected.toml says which folders belong to which feature, and how many tests of each run. If all were collected and the numbers
are others, nothing runs; ``--collect-only --count-tests`` writes them to the file. ``TIKV_BR_REAL_TABLE`` names a file for the table; otherwise
it is only printed.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.real.both import Verdict, verdict
from tests.support import real_servers
from tests.support.tools import ROOT

EXPECTED = ROOT / "tests" / "real" / "expected.toml"
TIERS = ("integration", "interop", "e2e")
_TABLE = os.environ.get("TIKV_BR_REAL_TABLE")


class Features:
    """The features of expected.toml. A test belongs to that with the longest of the paths that it is below."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        needed = {name: each["needs"] for name, each in content.items() if "needs" in each}
        self.unasked = {
            name: f"{variable} is not set" for name, variable in needed.items() if variable not in os.environ
        }
        self.expected = {name: int(each["tests"]) for name, each in content.items()}
        self._of_path = {path: name for name, each in content.items() for path in each["paths"]}

    def of(self, nodeid: str) -> str | None:
        """The feature of a test; None: it is in no list."""
        fitting = [path for path in self._of_path if f"{nodeid}::".startswith((f"{path}/", f"{path}::"))]
        return self._of_path[max(fitting, key=len)] if fitting else None


def load() -> Features:
    """The features as expected.toml has them."""
    return Features(tomllib.loads(EXPECTED.read_text()))


class _Run:
    def __init__(self) -> None:
        self.features = load()
        self.selected: Counter[str] = Counter()
        self.refused: dict[str, Counter[str]] = {}
        self.outcomes: dict[str, str] = {}

    def table(self) -> Iterator[str]:
        """The lines, of which the first has the versions."""
        chosen = real_servers.CHOSEN
        yield f"servers: {chosen.versions() if chosen else 'the playground'}"
        yield ""
        yield "| feature | passed | failed | skipped | not possible there | why not |"
        yield "|---|---|---|---|---|---|"
        totals: Counter[str] = Counter()
        for feature in self.features.expected:
            counts = Counter(outcome for item, outcome in self.outcomes.items() if self.features.of(item) == feature)
            why = self.refused.get(feature, Counter())
            counts["impossible"] = why.total()
            totals += counts
            reasons = ", ".join(f"{reason} ({number})" for reason, number in why.most_common())
            proven = "" if counts["passed"] else "**not proven** "
            yield (
                f"| {proven}{feature} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |"
                f" {counts['impossible']} | {reasons} |"
            )
        yield (f"| all | {totals['passed']} | {totals['failed']} | {totals['skipped']} | {totals['impossible']} | |")


class _Outcomes:
    def __init__(self, outcomes: dict[str, str]) -> None:
        self._outcomes = outcomes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended, here or in a worker."""
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self._outcomes.setdefault(report.nodeid, report.outcome)


_RUN = pytest.StashKey[_Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer to write the numbers."""
    parser.addoption("--count-tests", action="store_true", help=f"write the numbers of tests to {EXPECTED.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Keep what the table needs."""
    config.stash[_RUN] = _Run()
    config.pluginmanager.register(_Outcomes(config.stash[_RUN].outcomes))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those that run on both; refuse to run if there are not as many as expected."""
    run, kept, others = config.stash[_RUN], [], []
    for item in items:
        found = _verdict(item)
        feature = run.features.of(item.nodeid)
        if found.clusters and feature is None:
            raise pytest.UsageError(f"{item.nodeid} has no feature: add its file to {EXPECTED.relative_to(ROOT)}")
        if feature is not None and found.clusters and not found.reasons:
            run.selected[feature] += 1
            if feature not in run.features.unasked:
                kept.append(item)
                continue
        others.append(item)
        if feature is not None and found.clusters:
            reasons = found.reasons or {run.features.unasked[feature]}
            run.refused.setdefault(feature, Counter())[", ".join(sorted(reasons))] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=others)
    if config.option.count_tests:
        _write(run.selected)
    elif is_whole(config.args):
        wrong = dict(_differences(run.features.expected, run.selected))
        if wrong:
            raise pytest.UsageError(
                f"tests that run on both kinds of clusters (expected, found): {wrong}. If that is meant, add --collect-only --count-tests"
            )


def counted(features: Features, items: Iterable[pytest.Item]) -> Counter[str]:
    """The number of tests of each feature that run on both kinds of clusters."""
    both = [item for item in items if features.of(item.nodeid) is not None]
    found = [(features.of(item.nodeid) or "", _verdict(item)) for item in both]
    return Counter(feature for feature, each in found if each.clusters and not each.reasons)


def _verdict(item: pytest.Item) -> Verdict:
    name = getattr(item, "originalname", None) or item.name
    found = verdict(item.path, name)
    if (mark := item.get_closest_marker("emulator_only")) is not None:
        return Verdict(found.clusters, found.reasons | {str(mark.args[0])})
    return found


def is_whole(arguments: Iterable[str]) -> bool:
    """Whether these arguments of pytest select all tests of clusters."""
    return {f"tests/{tier}" for tier in TIERS} <= {argument.rstrip("/") for argument in arguments}


def _differences(expected: Mapping[str, int], found: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    for feature in expected:
        if expected[feature] != found.get(feature, 0):
            yield feature, (expected[feature], found.get(feature, 0))


def _write(found: Mapping[str, int]) -> None:
    parts = re.split(r'(?m)^\["(.+)"\]$', EXPECTED.read_text())
    for at in range(1, len(parts), 2):
        parts[at + 1] = re.sub(r"(?m)^tests = \d+$", f"tests = {found.get(parts[at], 0)}", parts[at + 1])
        parts[at] = f'["{parts[at]}"]'
    EXPECTED.write_text("".join(parts))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skipped test is none that ran: it fails the run, as expected.toml has counted it."""
    skipped = [name for name, outcome in session.config.stash[_RUN].outcomes.items() if outcome == "skipped"]
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, and save it."""
    run = config.stash[_RUN]
    if config.option.collectonly:
        for feature, number in run.selected.items():
            terminalreporter.write_line(f"{feature}: {number}")
        return
    lines = list(run.table())
    terminalreporter.section("on real servers" if real_servers.CHOSEN else "on the playground")
    for line in lines:
        terminalreporter.write_line(line)
    if _TABLE:
        Path(_TABLE).write_text("\n".join(lines) + "\n")
