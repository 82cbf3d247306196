"""A real etcd of one member, beside the keys and leases that the playground's PD serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tikv_br.errors import PlaygroundError
from tikv_br.playground.launcher import find_etcd, http_ok, last_line
from tikv_br.playground.servers import ReservedPort
from tikv_br.playground.settings import TlsSettings

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 30.0
_TRIES: Final = 3
_PORT_FILE: Final = "port"
_POLL_SECONDS: Final = 0.02
_PEER_SOCKET: Final = "localhost:1"
"""Socket for peers in the directory: a single member has none, but must listen."""
_PEER: Final = f"unix://{_PEER_SOCKET}"


class EtcdServer:
    """An etcd in a process of its own. It ends when the process that started it does."""

    def __init__(self, directory: Path, *, tls: TlsSettings | None = None, program: str = "") -> None:
        """Data and log are in `directory`. Raises `PlaygroundError` if `program` is empty and none is found."""
        self._program = program or find_etcd()
        self._directory = directory
        self._port = 0
        self._tls = tls
        self._reserved: ReservedPort | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise PlaygroundError("etcd is not running")
        return self._process

    def start(self) -> None:
        """Start it and wait until it answers. Raises `PlaygroundError`, with the last line of its log."""
        self._directory.mkdir(parents=True, exist_ok=True)
        kept = self._directory / _PORT_FILE
        for port in ([int(kept.read_text())] if kept.exists() else []) + [0] * _TRIES:  # 0 is any that is free
            self._reserve(port)
            self._launch()
            try:
                if self._await_health():
                    kept.write_text(str(self._port))
                    return
            except BaseException:
                self.kill()
                raise
            self.kill()
        raise PlaygroundError(f"etcd did not start at {self.address}: {last_line(self._log)}")

    def stop(self) -> None:
        """Terminate it, or kill it after `STOP_SECONDS`."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()
        self._release_port()

    def kill(self) -> None:
        """End it as kill -9 does. Its port stays reserved until it is started again or stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _reserve(self, port: int) -> None:
        """Reserve a port until etcd listens there. If it is taken, etcd reports that."""
        if self._reserved is not None and self._reserved.port == port:
            return
        self._release_port()
        self._port = port
        with suppress(PlaygroundError):
            self._reserved = ReservedPort(port)
            self._port = self._reserved.port

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    @property
    def _log(self) -> Path:
        return self._directory / "etcd.log"

    def _launch(self) -> None:
        (self._directory / _PEER_SOCKET).unlink(missing_ok=True)  # of a killed etcd
        url = f"{'http' if self._tls is None else 'https'}://{self.address}"
        arguments = [self._program, "--name=playground", "--data-dir=data", "--logger=zap", "--log-outputs=stderr"]
        arguments += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        arguments += [f"--listen-peer-urls={_PEER}", f"--initial-advertise-peer-urls={_PEER}"]
        arguments += [f"--initial-cluster=playground={_PEER}"]
        if tls := self._tls:
            arguments += [f"--cert-file={tls.cert}", f"--key-file={tls.key}", f"--trusted-ca-file={tls.ca}"]
            arguments += ["--client-cert-auth=true"] if tls.mutual else []
        if setpriv := shutil.which("setpriv"):  # so that the kernel ends it with this process
            arguments = [setpriv, "--pdeathsig=KILL", *arguments]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
            )

    def _await_health(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if http_ok(self.address, "/health", self._tls):
                return True
            time.sleep(_POLL_SECONDS)
        return False
