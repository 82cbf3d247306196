"""The overview in headless Chromium: how it looks, by keyboard, on a phone, and that it needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.browser import Page
from tests.unit.serve.samples import NOW_MS, healthy, overview, troubled
from tikv_br.serve.model import Overview
from tikv_br.serve.web import Site
from tikv_br.storage.crypter import SecretText
from tikv_br.web.address import Address
from tikv_br.web.server import listening

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-the-test"
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const channels = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(each => each / 255).map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = element => {  // translucent colours lie on those below
    const layers = [];
    for (; element; element = element.parentElement) {
      const colour = channels(getComputedStyle(element).backgroundColor);
      layers.unshift(colour);
      if (colour[3] === 255) break;
    }
    return layers.reduce((below, [r, g, b, a]) => [r, g, b].map((each, i) => each * a / 255 + below[i] * (1 - a / 255)));
  };
  const texts = [...document.querySelectorAll("body *")].filter(each =>
    [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()) && !each.closest("title"));
  const found = texts.map(each => {
    const colour = channels(each.closest("svg") ? getComputedStyle(each).fill : getComputedStyle(each).color);
    const [a, b] = [colour, ground(each.closest("svg") ? each.closest("svg").parentElement : each)].map(luminance).sort((a, b) => b - a);
    return [(a + 0.05) / (b + 0.05), each.textContent.slice(0, 40)];
  });
  return found.sort((a, b) => a[0] - b[0])[0];
})()
"""
OVERFLOWING = """
[...document.querySelectorAll("section, table, th, td, dd, p, li")]
  .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth).map(each => each.outerHTML.slice(0, 200))
"""

BOXES = """
[...document.querySelectorAll("dl > div")].map(each => each.getBoundingClientRect())
  .map(each => [each.left, each.top, each.right, each.bottom].map(edge => Math.round(edge)))
"""


@contextmanager
def opened(page: Page, found: Overview, token: str = "") -> Iterator[str]:
    """Open the page of an overview; yields its address."""
    page.size(1200, 900)
    address = Address("127.0.0.1", 0)
    site = Site(lambda _patience: found, lambda *_: None, address, SecretText(token), clock=lambda: NOW_MS / 1000)
    with listening(address, site.answer, methods=site.methods) as chosen:
        page.go(f"http://{chosen}/")
        yield f"http://{chosen}"
        page.go("about:blank")


def press(page: Page, key: str, code: int, text: str = "") -> None:
    """Press a key."""
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("states", ["well", "troubled"])
def test_it_is_readable(page: Page, scheme: str, states: str) -> None:
    """All text stands out from what is behind it (WCAG AA), in both schemes, also on a phone, where nothing is cut off or scrolled sideways."""
    page.colour_scheme(scheme)
    with opened(page, overview() if states == "well" else overview(troubled())) as url:
        for width in (1280, 1000, 900, 640, 500, 390, 320):
            page.size(width, 800)
            page.wait(f"innerWidth === {width}")
            assert page.value("document.documentElement.scrollWidth") <= width
            assert page.value(OVERFLOWING) == [], width
            ratio, text = page.value(CONTRAST)
            assert ratio >= 4.5, (text, width)
        ground = page.value("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", ground))) < 64) == (scheme == "dark")
        assert page.picture().startswith(b"\x89PNG")
        assert page.complaints == []
        assert set(page.requests) == {f"{url}/", f"{url}/serve.css"}


def test_names_are_text(page: Page) -> None:
    """Nothing of what others have written is run."""
    with opened(page, overview(troubled())):
        assert page.text().count("<script>alert(1)</script>") >= 6
        assert page.value("document.scripts.length") == 0
        assert page.complaints == []


def test_tables_stay_tables_on_a_phone(page: Page) -> None:
    """Screen readers get rows, headers and cells also if cells are laid out as cards."""
    with opened(page, overview()):
        page.size(375, 800)
        page.wait("innerWidth === 375")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = [node["role"]["value"] for node in nodes if not node.get("ignored")]
        assert roles.count("table") == 5
        assert {"rowheader", "cell", "banner", "navigation", "main", "contentinfo", "heading"} <= set(roles)
        assert roles.count("region") == 6
        assert page.value("getComputedStyle(document.querySelector('td'), '::before').content") == '"finished"'


@pytest.mark.parametrize("width", [1200, 800, 375])
def test_tiles_of_two_storages_do_not_overlap(page: Page, width: int) -> None:
    """Each storage has its own, with its whole address."""
    states = healthy()
    first = states.backups[0]
    long = replace(
        first,
        place="s3://another-bucket/backups/of/the/production/cluster?endpoint=https%3A%2F%2Fs3.example.com&region=eu-1",
    )
    with opened(page, overview(replace(states, backups=(first, long)))):
        page.size(width, 900)
        page.wait(f"innerWidth === {width}")
        assert "another-bucket" in page.text()
        boxes = page.value(BOXES)
        assert len(boxes) > 3
        for number, (left, top, right, bottom) in enumerate(boxes):
            assert left >= 0
            assert right <= width
            assert not [
                other
                for other in boxes[:number]
                if left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
            ]


def test_by_keyboard(page: Page) -> None:
    """Tab reaches the link past the header first, then every link, each with a visible mark; Enter follows it."""
    with opened(page, overview(troubled())):
        links = page.value("document.links.length")
        seen = []
        for _ in range(links):
            press(page, "Tab", 9)
            name, outline, is_seen = page.value(
                "(element => [element.textContent, getComputedStyle(element).outlineStyle + parseFloat(getComputedStyle(element).outlineWidth), "
                "element.getBoundingClientRect().left >= 0])(document.activeElement)"
            )
            assert (outline, is_seen) == ("solid3", True), name
            seen.append(name)
        assert seen[:5] == ["Skip to the content", "Stop", "JSON", "Backups", "Log archives"]
        assert len(seen) == links
        page.go(page.value("location.href"))
        press(page, "Tab", 9)
        press(page, "Enter", 13, "\r")
        page.wait("document.activeElement.id === 'main' && location.hash === '#main'")


def test_login(page: Page) -> None:
    """The token is typed, sent once, and not in the address; the cookie is not for scripts."""
    with opened(page, overview(), TOKEN) as url:
        assert "2026" not in page.text()
        for given, then in (
            ("wrong", "document.body.innerText.includes('not the token')"),
            (TOKEN, "document.getElementById('backups')"),
        ):
            page.wait("document.activeElement.id === 'token'")
            page.call("Input.insertText", text=given)
            press(page, "Enter", 13, "\r")
            page.wait(then)
        assert page.value("document.cookie") == ""
        assert page.value("location.href") == f"{url}/"
        assert not [each for each in page.requests if TOKEN in each]
        assert page.value("document.querySelector('meta[http-equiv=refresh]').content") == "60"
