"""Reports as pages that need nothing else: static HTML and SVG. No scripts, and none would run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tikv_br.report import plot
from tikv_br.report.facts import Cell
from tikv_br.report.figures import counted, day, figure, short_key, utc, visible
from tikv_br.report.recorder import Phase, Sample

if TYPE_CHECKING:
    from jinja2 import Environment

LARGEST = 10
"""Parts of the keyspace that are named beside its map."""


class Reported(Protocol):
    """What the plots of a report are drawn from."""

    @property
    def seconds(self) -> float:
        """How long it took."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What was done when."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """How far it was when."""

    @property
    def keyspace_map(self) -> tuple[Cell, ...]:
        """Where the data lie."""


def render(package: str, template: str, report: Reported, *, remains: Sequence[str] = (), **more: object) -> str:
    """The page of a report, by a template of a package that extends ``report.html``; ``remains`` is to be seen to by people."""
    return _environment(package).get_template(template).render(report=report, remains=remains, **_plots(report), **more)


def render_list(package: str, template: str, **values: object) -> str:
    """A page that is of no single report."""
    return _environment(package).get_template(template).render(**values)


def _plots(report: Reported) -> dict[str, Any]:
    shown = plot.worth_showing(report.phases, report.seconds)
    speeds = plot.throughput(report.samples)
    cells = report.keyspace_map
    return {
        "plot": plot,
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
    """Of the time in which something came."""
    busy = [value for _, value in speeds if value > 0]
    return sum(busy) / len(busy) if busy else 0.0


@functools.cache
def _environment(package: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

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
