"""Geometry of the report's plots: values to points of an SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tikv_br.report.facts import Cell
from tikv_br.report.recorder import Phase, Sample

WIDTH, HEIGHT = 640.0, 150.0
LEFT, BOTTOM = 64.0, 20.0
MIN_WIDTH = 1.5
"""Minimum width of a bar, in pixels, so that short phases are visible."""
ROW = 20.0
FAR = 4
"""Times the highest value."""
INSTANT = 0.1
"""Seconds below which throughput is not plotted."""
BUCKETS = 80
"""Points of the plot of throughput."""
WORTH = 0.005
"""Share of the whole time below which parts of a step are not in the timeline."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid: its place in pixels and its value."""

    at: float
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A plot of values over time or over drills; ``points`` in pixels."""

    points: tuple[tuple[float, float], ...]
    ticks: tuple[Tick, ...]
    limit: float | None = None
    """Height of the objective's line."""
    marks: tuple[Tick, ...] = ()
    """Places along the bottom."""
    absent: tuple[float, ...] = ()
    """Places without a value."""

    @property
    def area(self) -> str:
        """The polygon below the line."""
        base = HEIGHT - BOTTOM
        ends = (self.points[0][0], self.points[-1][0]) if self.points else (LEFT, LEFT)
        return f"{ends[0]:.1f},{base:.1f} {self.line} {ends[1]:.1f},{base:.1f}"

    @property
    def line(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase in the timeline, or a cell of the map; pixels."""

    x: float
    width: float
    y: float = 0.0
    shade: float = 0.0
    """Shade from 0 to 1."""


def curve(
    places: Sequence[float],
    values: Sequence[float | None],
    limit: float | None = None,
    *,
    unit: str = "",
    marks: Sequence[float] = (),
) -> Curve:
    """Values (None = no value) at places, scaled to the plot; a single place is in the middle.

    A limit far above all values is not drawn, because it would flatten them.
    """
    first, last = min(places, default=0.0), max(places, default=0.0)
    highest = max((value or 0.0 for value in values), default=0.0)
    if limit is not None and 0 < highest * FAR < limit:
        limit = None
    top = nice_top(max(highest, limit or 0.0), unit)
    span = (last - first) or 1.0

    def x(place: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * ((place - first) / span if last > first else 0.5)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 8) * value / top

    both = list(zip(places, values, strict=True))
    return Curve(
        tuple((x(place), y(value)) for place, value in both if value is not None),
        tuple(Tick(y(value), value) for value in (0.0, top / 2, top)),
        None if limit is None else y(limit),
        tuple(Tick(x(mark), mark) for mark in marks),
        tuple(x(place) for place, value in both if value is None),
    )


def over_time(values: Sequence[tuple[float, float]], unit: str, marks: int = 5) -> Curve:
    """A curve over (seconds, value) with ``marks`` on its time axis."""
    first, last = values[0][0], values[-1][0]
    at = [first + (last - first) * number / (marks - 1) for number in range(marks)]
    return curve([place for place, _ in values], [value for _, value in values], unit=unit, marks=at)


def nice_top(value: float, unit: str = "") -> float:
    """The smallest of 1, 2, 5, 10, 20, … that is not below the value, in a multiple of ``unit`` of that size; 1 for 0."""
    if value <= 0:
        return 1.0
    whole = _whole(value, unit)
    power = 10.0 ** math.floor(math.log10(value / whole))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value / whole * (1 - 1e-9)) * whole


def _whole(value: float, unit: str) -> float:
    """The readable multiple of a unit: KiB, MiB, … of bytes, minutes and hours of seconds."""
    match unit:
        case "B" | "B/s":
            return 1024.0 ** max(math.floor(math.log(value, 1024)), 0)
        case "s":
            return next(size for size in (3600.0, 60.0, 1.0) if value >= size or size == 1)
        case _:
            return 1.0


def visible_phases(phases: Iterable[Phase], seconds: float) -> list[Phase]:
    """All steps of the drill, and their parts that took some time or failed."""
    return [each for each in phases if not each.inside or not each.ended_well or each.seconds >= WORTH * seconds]


def timeline(phases: Iterable[Phase], seconds: float) -> list[Bar]:
    """A bar for each phase, one below the other."""
    scale = WIDTH / (seconds or 1.0)
    return [
        Bar(phase.begin * scale, max(phase.seconds * scale, MIN_WIDTH), number * ROW)
        for number, phase in enumerate(phases)
    ]


def throughput(samples: Sequence[Sample], most: int = BUCKETS) -> list[tuple[float, float]]:
    """(seconds since the start, bytes per second) of up to ``most`` equal intervals.

    The bytes between two samples are spread evenly over that time. Empty if the samples cover less than `INSTANT`.
    """
    if len(samples) < 2 or samples[-1].seconds - samples[0].seconds < INSTANT:
        return []
    first = samples[0].seconds
    width = (samples[-1].seconds - first) / most
    came = [0.0] * most
    last = samples[0]
    for sample in samples[1:]:
        if sample.step == last.step and sample.bytes == last.bytes:
            continue
        if sample.step == last.step and sample.bytes > last.bytes:
            _spread(came, (last.seconds - first) / width, (sample.seconds - first) / width, sample.bytes - last.bytes)
        last = sample
    return [(first + (place + 0.5) * width, size / width) for place, size in enumerate(came)]


def _spread(parts: list[float], begin: float, end: float, amount: float) -> None:
    """Distribute an amount over the parts between two places, in proportion to their overlap."""
    first, last = min(int(begin), len(parts) - 1), min(int(end), len(parts) - 1)
    if first == last:
        parts[first] += amount
        return
    for place in range(first, last + 1):
        parts[place] += amount * (min(place + 1, end) - max(place, begin)) / (end - begin)


def strip(cells: Sequence[Cell]) -> list[Bar]:
    """The keyspace from left to right: width = bytes of a part, shade = keys per byte."""
    total = sum(cell.data_bytes for cell in cells) or 1
    densest = max((_density(cell) for cell in cells), default=0.0) or 1.0
    bars, x = [], 0.0
    for cell in cells:
        width = WIDTH * cell.data_bytes / total
        bars.append(Bar(x, width, shade=0.25 + 0.75 * _density(cell) / densest))
        x += width
    return bars


def _density(cell: Cell) -> float:
    return cell.keys / cell.data_bytes if cell.data_bytes else 0.0
