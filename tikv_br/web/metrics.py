"""Metrics in the formats of Prometheus, for ``/metrics`` and for node_exporter's textfile collector."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path

from prometheus_client import CollectorRegistry, Info, ProcessCollector, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tikv_br import __version__
from tikv_br.web.server import TEXT, HttpResponse

Collect = Callable[[], Iterable[Metric]]
"""Reads the figures at each scrape, so that no metric keeps a count of its own. Called from any thread."""


def registry(collect: Collect) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(_Collector(collect))
    return made


def process_registry(collect: Collect) -> CollectorRegistry:
    """The same, with the metrics of this process and the version of tikv-br."""
    made = registry(collect)
    ProcessCollector(registry=made)
    Info("tikv_br_build", "The version of tikv-br.", registry=made).info({"version": __version__})
    return made


def respond(metrics: CollectorRegistry, accept: str) -> HttpResponse:
    """The answer to a scrape, in the format that its header Accept asks for."""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # raised by the Prometheus client if the version is not a number
        text = b"the header Accept asks for an unsupported version of the text format\n"
        return HttpResponse(TEXT, text, HTTPStatus.BAD_REQUEST)
    return HttpResponse(content_type, encode(metrics))


def write_textfile(path: Path, metrics: CollectorRegistry) -> None:
    """Replace a file at once, so that no reader sees a part of it. Raises `OSError`; devices and folders are refused."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "not a file", str(path))
    write_to_textfile(str(path), metrics)


def read_textfile(path: Path) -> dict[tuple[str, str], float]:
    """The figures of a file of `write_textfile` by name and first label; none if it does not exist or is of another tool."""
    try:
        families = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
    return {(each.name, next(iter(each.labels.values()), "")): each.value for it in families for each in it.samples}


class _Collector(Collector):
    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield from self._collect()
