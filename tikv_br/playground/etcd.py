"""A real etcd of one member: what PD has built in, beside a playground that has not."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tikv_br.errors import PlaygroundError
from tikv_br.playground.held_port import HeldPort
from tikv_br.playground.settings import TlsSettings

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 30.0
_TRIES: Final = 3
_PORT_FILE: Final = "port"
_POLL_SECONDS: Final = 0.02
_PEER_SOCKET: Final = "localhost:1"
"""In the folder: one member has nobody to talk to, but must listen."""
_PEER: Final = f"unix://{_PEER_SOCKET}"


def find_etcd() -> str:
    """The program: ``ETCD_BINARY``, or the first on PATH. Raises `PlaygroundError` where there is none."""
    found = shutil.which(os.environ.get("ETCD_BINARY") or "etcd")
    if found is None:
        raise PlaygroundError(
            "there is no program etcd on PATH",
            hint="Install it (Debian, Ubuntu: apt-get install etcd-server), or set ETCD_BINARY to where it is.",
        )
    return found


class EtcdServer:
    """An etcd in a process of its own. It ends when the process that started it does."""

    def __init__(self, directory: Path, *, port: int = 0, tls: TlsSettings | None = None, program: str = "") -> None:
        """Data and log lie in `directory`; port 0 means the same as before if it is free, or any.

        Raises `PlaygroundError` where there is no `program` and none is found.
        """
        self._program = program or find_etcd()
        self._directory = directory
        self._asked_port = port
        self._port = port
        self._tls = tls
        self._held: HeldPort | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Its ``host:port`` for clients."""
        return f"127.0.0.1:{self._port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, for signals."""
        if self._process is None:
            raise PlaygroundError("etcd is not running")
        return self._process

    def start(self) -> None:
        """Start it; returns once it answers. Raises `PlaygroundError`, with the last line of its log."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for port in self._ports():
            self._hold(port)
            self._launch()
            try:
                if self._await_health():
                    (self._directory / _PORT_FILE).write_text(str(self._port))
                    return
            except BaseException:
                self.kill()
                raise
            self.kill()
        raise PlaygroundError(f"etcd did not start at {self.address}: {self._last_line()}")

    def stop(self) -> None:
        """End it in order, or by force where it does not end within `STOP_SECONDS`."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()
        self._let_go()

    def kill(self) -> None:
        """End it as kill -9 does. Its port stays its own, and refuses, until it is started again or stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ports(self) -> Iterator[int]:
        """Which to try, one after the other; 0 is any that is free."""
        if self._asked_port:
            yield self._asked_port
            return
        kept = self._directory / _PORT_FILE
        if kept.exists():
            yield int(kept.read_text())
        for _attempt in range(_TRIES):
            yield 0

    def _hold(self, port: int) -> None:
        """Have a port that nobody takes between our look and etcd's. One that is taken is etcd's to complain of."""
        if self._held is not None and self._held.port == port:
            return
        self._let_go()
        self._port = port
        with suppress(PlaygroundError):
            self._held = HeldPort(port)
            self._port = self._held.port

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    @property
    def _log(self) -> Path:
        return self._directory / "etcd.log"

    def _launch(self) -> None:
        (self._directory / _PEER_SOCKET).unlink(missing_ok=True)  # what a killed one left
        url = f"{'http' if self._tls is None else 'https'}://{self.address}"
        arguments = [self._program, "--name=playground", "--data-dir=data", "--logger=zap", "--log-outputs=stderr"]
        arguments += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        arguments += [f"--listen-peer-urls={_PEER}", f"--initial-advertise-peer-urls={_PEER}"]
        arguments += [f"--initial-cluster=playground={_PEER}", *self._tls_arguments()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                _dies_with_us(arguments),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
            )

    def _tls_arguments(self) -> list[str]:
        if self._tls is None:
            return []
        files = [f"--cert-file={self._tls.cert}", f"--key-file={self._tls.key}", f"--trusted-ca-file={self._tls.ca}"]
        return [*files, "--client-cert-auth=true"] if self._tls.mutual else files

    def _await_health(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self._health() == http.client.OK:
                    return True
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(_POLL_SECONDS)
        return False

    def _health(self) -> int:
        if self._tls is None:
            connection = http.client.HTTPConnection(self.address, timeout=5)
        else:
            context = ssl.create_default_context(cafile=self._tls.ca)
            context.load_cert_chain(self._tls.cert, self._tls.key)
            connection = http.client.HTTPSConnection(self.address, timeout=5, context=context)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"see {self._log}"


def _dies_with_us(arguments: list[str]) -> list[str]:
    """The command under a program that has the kernel end it with its parent, where there is that program."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig=KILL", *arguments] if setpriv else arguments
