"""A page in headless Chromium, steered over its DevTools pipe: no driver, no port, nothing to download."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.tools import find_tool

PATIENCE = 60.0
"""Seconds that a slow machine may take."""
FLAGS = (
    "--headless",
    "--no-sandbox",  # CI runs as root, where the sandbox cannot be had; the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--window-size=1200,900",
    "--remote-debugging-pipe",
)


class Page:
    """One tab, and what it complained of and asked for since it was opened."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self.complaints: list[str] = []
        """Console messages from warnings on, exceptions, and what could not be fetched."""
        self.requests: list[str] = []
        """URLs that were asked for."""
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._loaded: queue.Queue[str] = queue.Queue()
        """Documents that are there with all that belongs to them."""
        self._session: str | None = None
        self._reader = threading.Thread(target=self._read, name="browser", daemon=True)
        self._reader.start()

    def attach(self) -> None:
        """Open the tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
        """Run one command of the DevTools protocol."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        reply = self._replies.get(timeout=PATIENCE)
        assert reply["id"] == number, reply
        assert "error" not in reply, (method, reply)
        result: dict[str, Any] = reply["result"]
        return result

    def go(self, url: str) -> None:
        """Load a page, and forget what was noted of the one before; until it is there, that one still answers."""
        self.complaints.clear()
        self.requests.clear()
        done = self.call("Page.navigate", url=url)
        assert not done.get("errorText"), (url, done)
        if "loaderId" in done:  # another document, not another place in the same
            while self._loaded.get(timeout=PATIENCE) != done["loaderId"]:
                pass

    def value(self, expression: str) -> Any:  # noqa: ANN401 - any JSON
        """Value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, (expression, done)
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true; one that fails, as before the page is there, counts as false."""
        until = time.monotonic() + PATIENCE
        while True:
            done = self.call("Runtime.evaluate", expression=f"!!({expression})", returnByValue=True)
            if done["result"].get("value") is True:
                return
            assert time.monotonic() < until, f"never true: {expression}; {self.complaints}; page: {self.text()}"
            time.sleep(0.1)

    def text(self) -> str:
        """All that a reader sees."""
        return str(self.value("document.body.innerText"))

    def size(self, width: int, height: int) -> None:
        """Make the window so large, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer, in pixels from the upper left corner."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def colour_scheme(self, scheme: str) -> None:
        """Let the reader prefer ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """Screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def join(self) -> None:
        """Wait until the browser has ended."""
        self._reader.join(PATIENCE)

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._answers.fileno(), 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._replies.put(message)
                else:
                    self._note(message["method"], message["params"])

    def _note(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(str(event["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if event["type"] in {"error", "warning", "assert"}:
                self.complaints.append(str(event["args"]))
            case "Log.entryAdded" if event["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Page.lifecycleEvent" if event["name"] == "load":
                self._loaded.put(event["loaderId"])
            case "Network.requestWillBeSent":
                self.requests.append(event["request"]["url"])


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a Chromium that was started for it, and is gone afterwards."""
    program = find_tool(
        "chromium-headless-shell",
        "chromium",
        "chromium-browser",
        "google-chrome",
        hint="apt-get install chromium-headless-shell, or set TIKV_BR_CHROMIUM",
        variable="TIKV_BR_CHROMIUM",
    )
    with ExitStack() as stack:
        profile = Path(tempfile.mkdtemp(prefix="browser-"))
        stack.callback(shutil.rmtree, profile, ignore_errors=True)  # its last child may still write there
        their_in, our_out = _pipe()
        our_in, their_out = _pipe()
        commands = stack.enter_context(os.fdopen(our_out, "wb", buffering=0))
        page = Page(commands, stack.enter_context(os.fdopen(our_in, "rb", buffering=0)))
        stack.callback(page.join)
        # Chromium reads descriptor 3 and writes 4.
        joined = ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "browser", program, *FLAGS]
        joined += [f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(joined, pass_fds=(their_in, their_out), stdin=quiet, stdout=quiet, stderr=quiet)
        stack.callback(process.wait)
        stack.callback(process.kill)
        os.close(their_in)
        os.close(their_out)
        page.attach()
        yield page
        page._session = None
        page.call("Browser.close")


def _pipe() -> tuple[int, int]:
    """Both ends, with numbers above those that Chromium wants."""
    high = []
    for low in os.pipe():
        high.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(low)
    return high[0], high[1]
