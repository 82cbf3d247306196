"""The status page in headless Chromium: what it says, what it plots, how it looks, and that it needs nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Self

import pytest

from tests.support.browser import Page
from tests.unit.incremental.statuses import status, steady
from tikv_br.incremental.watch.server import serve
from tikv_br.incremental.watch.status import NamedStatus
from tikv_br.storage.crypter import SecretText
from tikv_br.web.address import Address

POINTS = 2
"""Minimum points of a plot, and so its seconds."""
KEY = SecretText("a-key/of the test")
VALUE_AT_END = """
(field => {
  // As a reader does it: the height of the curve's last point between two labels of the axis.
  const path = document.querySelector(`path[data-field=${field}]`), svg = path.ownerSVGElement;
  const labels = [...svg.querySelectorAll("text[text-anchor=end]")].map(each => [parseFloat(each.textContent), +each.getAttribute("y") - 4]);
  const [low, lowY] = labels[0], [high, highY] = labels.at(-1), {x, y} = path.getPointAtLength(path.getTotalLength());
  const read = low + (y - lowY) / (highY - lowY) * (high - low), drawn = cards.get("steady").points[field].at(-1);
  return {read, drawn, x, width: svg.clientWidth, labels: labels.length};
})(%r)
"""
CONTRASTS = """
(() => {
  const luminance = colour => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(each => each / 255)
      .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
  };
  const contrast = (element, property) => {
    const [a, b] = [getComputedStyle(element)[property], ground(element)].map(luminance).sort((a, b) => b - a);
    return (a + 0.05) / (b + 0.05);
  };
  const all = (selector, property) => [...document.querySelectorAll(selector)].map(each => contrast(each, property));
  return {
    text: Math.min(...all("h1, h2, h3, p, dt, dd, header span, .legend span", "color"), ...all("svg text", "fill")),
    curves: Math.min(...all("path.curve", "stroke")),
    ground: getComputedStyle(document.body).backgroundColor,
  };
})()
"""


class Shown:
    """A page on syncs that a test sets."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.began = time.monotonic()
        self.lag = 3.0
        self.ends = {"source": "10.0.0.1:2379", "sink": "tikv://10.2.0.1:2379"}
        self.others: list[NamedStatus] = []
        self._server = ExitStack()

    def __enter__(self) -> Self:
        self.address: Address = self._server.enter_context(serve(Address("127.0.0.1", 0), self.found, key=KEY))
        self.page.size(1200, 900)
        self.page.go(f"http://{self.address}/#{KEY.reveal()}")
        return self

    def __exit__(self, *_: object) -> None:
        self.page.go("about:blank")
        self.end()

    def found(self) -> list[NamedStatus]:
        """The sync ``steady``, which the page finds running, and the test's own ones."""
        return [NamedStatus("steady", steady(self.began, self.lag), **self.ends), *self.others]

    def end(self) -> None:
        """End the server."""
        self._server.close()

    def wait_for_plots(self) -> None:
        """Until the plots of ``steady`` have some points."""
        path = "document.querySelector('[data-sync=steady] path.curve')"
        self.page.wait(f"{path}.getAttribute('d').split(/[ML]/).length > {POINTS}")


@pytest.fixture
def shown(page: Page) -> Iterator[Shown]:
    """A page that was just opened."""
    with Shown(page) as shown:
        yield shown


def test_figures_and_plots_are_those_of_the_sync(shown: Shown) -> None:
    """Text has every figure; the curves end at the right edge, at the height that the axis gives to the figures."""
    page = shown.page
    shown.wait_for_plots()
    text = page.text()
    for said in (
        "steady",
        "runs",
        "healthy",
        "3.0 s",
        "2.0 s",
        "2,000",
        "1.0 MiB + 2.0 MiB on disk",
        "10.0.0.1:2379 → tikv://10.2.0.1:2379",
    ):
        assert said in text
    assert "not_leader: 3, stalled: 1" in text
    assert "store 4 went away" in text
    expected = {"checkpoint_lag": 3, "resolved_lag": 2, "events_per_second": 2000, "written_per_second": 1500}
    for field, value in expected.items():
        end = page.value(VALUE_AT_END % field)
        assert end["drawn"] == pytest.approx(value, rel=0.5)  # by a clock that a busy machine reads late
        assert end["read"] == pytest.approx(end["drawn"], rel=0.02)
        assert end["width"] - 20 < end["x"] < end["width"]
        assert end["labels"] >= 3
    assert page.complaints == []
    assert {re.sub(r"\d+$", "", url) for url in page.requests} == {
        f"http://{shown.address}/{path}" for path in ("", "status", "history?since=")
    }


def test_the_key_is_asked_for(shown: Shown) -> None:
    """Without a key there is a form; a wrong one is said to be; with the right one figures show, also after a reload, and the address never has it."""
    page = shown.page
    enter = (
        "(key => { const form = document.getElementById('key'); form.elements.key.value = key; form.requestSubmit(); })"
    )
    page.value("Storage.prototype.setItem = () => {}; sessionStorage.clear()")  # which each answer fills again
    page.go(f"http://{shown.address}/?again")
    page.wait("document.body.innerText.includes('enter the status key') && !document.getElementById('key').hidden")
    page.value(f"{enter}('another')")
    page.wait("document.body.innerText.includes('wrong key')")
    page.value(f"{enter}({KEY.reveal()!r})")
    page.wait("document.getElementById('key').hidden && document.querySelector('[data-sync=steady]')")
    assert not [url for url in page.requests if "a-key" in url.partition("#")[0]]
    page.go(f"http://{shown.address}/?reloaded")
    page.wait("document.querySelector('[data-sync=steady]')")
    assert "a-key" not in page.value("location.href")
    page.value("sessionStorage.clear()")


def test_a_reader_can_look_back(shown: Shown) -> None:
    """Under the pointer the legend shows that moment; without it, the last one."""
    page = shown.page
    shown.wait_for_plots()
    legend = "document.querySelector('.legend .faint').textContent"
    first = page.value("new Date(cards.get('steady').points.ms[0]).toLocaleTimeString('en-GB')")
    box = page.value("(({x, y}) => [x, y])(document.querySelector('svg').getBoundingClientRect())")
    page.point_at(box[0] + 60, box[1] + 60)
    page.wait(f"{legend} === {first!r} && document.querySelectorAll('.cursor').length === 1")
    page.point_at(1, 1)
    page.wait(f"{legend} !== {first!r} && document.querySelectorAll('.cursor').length === 0")
    assert page.complaints == []


def test_a_lag_that_is_over_does_not_flatten_the_plot(shown: Shown) -> None:
    """After a catch-up the axis fits the lag of the last minute, and names the earlier maximum."""
    page = shown.page
    shown.wait_for_plots()
    page.value(
        "(points => { const first = points.ms[0]; for (const field in points) points[field] = "
        "[field === 'ms' ? first - 90000 : field.endsWith('lag') ? 7384 : 0, ...points[field]]; })(cards.get('steady').points)"
    )
    page.value("cards.get('steady').draw()")
    page.wait("document.querySelector('svg .cut').textContent === 'cut off: up to 2 h 3 min before'")
    end = page.value(VALUE_AT_END % "checkpoint_lag")
    assert end["read"] == pytest.approx(end["drawn"], rel=0.05)
    assert "7384" not in page.value("document.querySelector('svg').textContent")
    assert page.value("document.querySelectorAll('svg .cut').length") == 1


def test_trouble_is_told_as_it_comes_and_goes(shown: Shown) -> None:
    """Syncs appear, fail, lag and vanish while the page is open; a name is shown as it is, whatever it holds."""
    page = shown.page
    name = "<img src=x onerror=alert(1)>"
    page.wait("document.getElementById('health').innerText === 'healthy'")
    shown.others = [NamedStatus("broken", status(), error="the safe point is lost"), NamedStatus(name, None)]
    page.wait("document.querySelectorAll('section').length === 3")
    text = page.text()
    assert "unhealthy" in text
    assert "the safe point is lost" in text
    assert name in text
    assert "has not started yet" in text
    assert "50, 2 scanning, 1 missing" in text
    shown.others = [NamedStatus("gaps", status())]
    page.wait("document.body.innerText.includes('degraded: parts of the range without a subscription: 1')")
    assert page.text().splitlines()[2] == "degraded"
    shown.others, shown.lag = [], 7384.0
    page.wait("document.querySelectorAll('section').length === 1")
    page.wait("document.body.innerText.includes('7384 s behind, which is more than 300 s')")
    assert "2 h 3 min" in page.text()
    shown.lag = 3.0
    page.wait("document.getElementById('health').innerText === 'healthy'")
    assert page.complaints == []
    shown.end()
    page.wait("document.body.innerText.includes('no answer since')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable(shown: Shown, scheme: str) -> None:
    """In both schemes text and curves stand out from the ground (WCAG AA), also on a telephone, where nothing is cut off."""
    page = shown.page
    page.colour_scheme(scheme)
    shown.others = [NamedStatus("broken", None, error="x" * 300)]
    page.wait("document.querySelectorAll('section').length === 2")
    shown.wait_for_plots()
    contrasts = page.value(CONTRASTS)
    assert contrasts["text"] >= 4.5
    assert contrasts["curves"] >= 3
    assert (max(map(int, re.findall(r"\d+", contrasts["ground"]))) < 64) == (scheme == "dark")
    page.size(360, 800)
    page.wait("innerWidth === 360 && document.querySelector('svg').clientWidth < 340")
    assert page.value("document.documentElement.scrollWidth") <= 360
    assert page.picture().startswith(b"\x89PNG")
    assert page.complaints == []
