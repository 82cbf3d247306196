"""Reports as self-contained pages: static HTML and SVG, no scripts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.redaction import visible_lines
from tikv_br.report import plot
from tikv_br.report.facts import Cell, counted, day, figure, short_key, utc
from tikv_br.report.recorder import Phase, Sample

if TYPE_CHECKING:
    from jinja2 import Environment

LARGEST = 10
"""Number of parts of the keyspace that are listed beside its map."""


class ReportData(Protocol):
    """The values that a report's plots show."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases with their times."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Samples of the progress."""

    @property
    def keyspace_map(self) -> tuple[Cell, ...]:
        """Distribution of the data over the key space."""


def render(package: str, template: str, report: ReportData, *, remains: Sequence[str] = (), **more: object) -> str:
    """The page of a report, by a package's template that extends ``report.html``; ``remains``: what needs manual work."""
    return _environment(package).get_template(template).render(report=report, remains=remains, **_plots(report), **more)


def render_list(package: str, template: str, **values: object) -> str:
    """A page of no single report."""
    return _environment(package).get_template(template).render(**values)


def _plots(report: ReportData) -> dict[str, Any]:
    shown = plot.visible_phases(report.phases, report.seconds)
    speeds = plot.throughput(report.samples)
    cells = report.keyspace_map
    return {
        "plot": plot,
        "physical_ms": physical_ms,
        "bars": list(zip(shown, plot.timeline(shown, report.seconds), strict=True)),
        "hidden": len(report.phases) - len(shown),
        "longest": max((each for each in shown if not each.inside), key=lambda each: each.seconds, default=None),
        "speed": plot.over_time(speeds, "B/s") if any(value for _, value in speeds) else None,
        "fastest": max((value for _, value in speeds), default=0.0),
        "average": _average(speeds),
        "strip": list(zip(cells, plot.strip(cells), strict=True)),
        "largest": sorted(cells, key=lambda cell: -cell.data_bytes)[:LARGEST],
    }


def _average(speeds: Sequence[tuple[float, float]]) -> float:
    """Return the average speed, without the time in which nothing was transferred."""
    busy = [value for _, value in speeds if value > 0]
    return sum(busy) / len(busy) if busy else 0.0


@functools.cache
def _environment(package: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        return visible_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    own = "tikv_br.report"
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name, "pages") for name in dict.fromkeys((package, own))]),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"figure": figure, "utc": utc, "day": day, "key": short_key, "counted": counted}
    return made
