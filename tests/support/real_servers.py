"""Processes of ``pd-server`` and ``tikv-server`` for tests, on ports of 127.0.0.1, each with a small configuration file.

``TIKV_BR_PD_SERVER`` and ``TIKV_BR_TIKV_SERVER`` name the programs. Every process is ended by its id: by `RealServers.stop`, and by a
watcher that outlives this process, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.ports import accepts, reserve_port
from tests.support.waiting import PATIENCE, eventually
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.settings import TlsSettings

STOP_SECONDS = 10.0
ELECTION_SECONDS = 3.0
"""Longest time without a leader: the votes for a region that was just split off may be lost, and then it has none for that long."""


@dataclass(frozen=True)
class Programs:
    """Paths of the servers' programs."""

    pd: str
    tikv: str

    def versions(self) -> str:
        """What they say of themselves, in a line: ``TiKV 8.5.7, PD v8.5.2``."""
        found = []
        for name, program, flag in (("TiKV", self.tikv, "--version"), ("PD", self.pd, "-V")):
            said = subprocess.run([program, flag], capture_output=True, text=True, timeout=60, check=True).stdout
            lines = (line.partition("Release Version:")[2].strip() for line in said.splitlines())
            found.append(f"{name} {next(filter(None, lines), said.strip())}")
        return ", ".join(found)


def _chosen() -> Programs | None:
    pd, tikv = os.environ.get("TIKV_BR_PD_SERVER"), os.environ.get("TIKV_BR_TIKV_SERVER")
    return Programs(str(Path(pd).absolute()), str(Path(tikv).absolute())) if pd and tikv else None


CHOSEN = _chosen()
"""Read once: tests run with an environment that has neither."""


@dataclass(frozen=True)
class Shape:
    """The settings of `live_cluster` that real servers have; times in seconds."""

    api_version: ApiVersion
    stores: int = 3
    replicas: int = 0
    regions: int = 1
    pd_members: int = 1
    pd_port: int = 0
    resolved_ts_interval: float = 1.0
    election_timeout: float = 10.0
    ts_ahead: float = 3.0
    disconnect_delay: float = 20.0
    """PD has 20 s, whatever is here."""
    balance: bool = False
    keyspaces: tuple[str, ...] = ()
    tls: TlsSettings | None = None

    @property
    def voters(self) -> int:
        """Replicas of each region."""
        return self.replicas or min(3, self.stores)


@dataclass
class Server:
    """One process, which may be started again."""

    name: str
    address: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    wanted: bool = False
    """False once a test has killed it."""

    @property
    def alive(self) -> bool:
        """Whether it runs, frozen or not."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, and have the watcher know."""
        assert not self.alive
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal is for pytest, which then ends what it started.
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.wanted = True
        _watcher().add(self.process.pid)

    def send(self, number: int) -> None:
        """Send a signal."""
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and wait until its address refuses connections."""
        self.wanted = False
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(PATIENCE)
            _watcher().remove(self.process.pid)
        eventually(lambda: not accepts(self.address))

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""


@dataclass
class RealServers:
    """The processes of one cluster, in a folder of its own below that for temporary files."""

    shape: Shape
    programs: Programs
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tikv-br-real-")))
    pds: list[Server] = field(default_factory=list)
    stores: list[Server] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        urls = [(self._port(shape.pd_port if not index else 0), self._port()) for index in range(shape.pd_members)]
        scheme = "https" if shape.tls else "http"
        everyone = ",".join(f"pd-{index + 1}={scheme}://{peer}" for index, (_, peer) in enumerate(urls))
        self.members = [client for client, _ in urls]
        for index, (client, peer) in enumerate(urls):
            name = f"pd-{index + 1}"
            self.pds.append(
                self._server(
                    name,
                    client,
                    _pd_config(shape),
                    [self.programs.pd, f"--name={name}", f"--initial-cluster={everyone}"],
                    {
                        "data-dir": str(self.folder / name),
                        "client-urls": f"{scheme}://{client}",
                        "peer-urls": f"{scheme}://{peer}",
                    },
                )
            )
        for index in range(shape.stores):
            name, address = f"store-{index + 1}", self._port()
            self.stores.append(
                self._server(
                    name,
                    address,
                    _tikv_config(shape, index),
                    [self.programs.tikv],
                    {
                        "addr": address,
                        "status-addr": self._port(),
                        "data-dir": str(self.folder / name),
                        "pd-endpoints": ",".join(self.members),
                    },
                )
            )

    def _port(self, number: int = 0) -> str:
        return f"127.0.0.1:{number or reserve_port(self)}"

    def _server(
        self, name: str, address: str, config: Mapping[str, Any], command: list[str], flags: dict[str, str]
    ) -> Server:
        path = self.folder / f"{name}.toml"
        path.write_text(to_toml(config))
        log = self.folder / f"{name}.log"
        words = [*command, *(f"--{flag}={value}" for flag, value in flags.items()), f"--config={path}"]
        return Server(name, address, words, log)

    def start(self) -> None:
        """Start all. Stores wait for PD, and PD for stores."""
        for server in (self.pds[0], self.stores[0]):
            _check_config(server)
        for server in (*self.pds, *self.stores):
            server.start()

    def await_pd(self) -> None:
        """Wait until all members of PD listen."""

        def do_listen() -> bool:
            self.assert_alive()
            return all(map(accepts, self.members))

        eventually(do_listen)

    def dead(self) -> list[Server]:
        """Those that ended by themselves."""
        return [server for server in (*self.pds, *self.stores) if server.wanted and not server.alive]

    def assert_alive(self) -> None:
        """Fail with the log of a server that ended by itself."""
        for server in self.dead():
            code = server.process.returncode if server.process else None
            raise AssertionError(f"{server.name} ended by itself with {code}: {server.last_words()}")

    def stop(self) -> None:
        """End all, frozen ones too, and remove the folder."""
        for server in (*self.stores, *self.pds):
            server.wanted = False
            server.send(signal.SIGKILL)  # nobody needs the data
        for server in (*self.stores, *self.pds):
            if server.process is not None:
                server.process.wait(STOP_SECONDS)
                _watcher().remove(server.process.pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def frozen(self, store: Server) -> Iterator[None]:
        """Stop a process with SIGSTOP for the length of the block."""
        store.send(signal.SIGSTOP)
        time.sleep(0.3)  # until stand-ins are seen to be stopped
        try:
            yield
        finally:
            store.send(signal.SIGCONT)


_CHECKED = set[str]()


def _check_config(server: Server) -> None:
    """Have a program check its configuration file, once for each: servers ignore what they do not know, or only warn."""
    path = Path(server.command[-1].removeprefix("--config="))
    if (content := path.read_text()) in _CHECKED:
        return
    ended = subprocess.run([*server.command, "--config-check"], capture_output=True, text=True, timeout=60, check=False)
    said = ended.stdout + ended.stderr
    assert "config check successful" in said, f"{path}: {ended.returncode}: {said}"
    _CHECKED.add(content)


def _pd_config(shape: Shape) -> dict[str, Any]:
    """A quick lease and election; no balancing, unless a test wants it, and no merges that nobody asked for."""
    own = {"leader-schedule-limit": 4, "region-schedule-limit": 64} if shape.balance else {}
    return {
        "lease": 1,
        "tick-interval": "100ms",
        "election-interval": "1s",
        "log": {"level": "warn"},
        "pd-server": {"dashboard-address": "none"},
        "replication": {"max-replicas": shape.voters},
        "schedule": {
            "merge-schedule-limit": 0,
            "hot-region-schedule-limit": 0,
            "leader-schedule-limit": 0,
            "region-schedule-limit": 0,
            **own,
        },
        **_security(shape.tls, "cacert-path", "cert-path", "key-path"),
    }


def _tikv_config(shape: Shape, index: int) -> dict[str, Any]:
    """Bounded memory, short ticks, and elections that take as long as a test says, but from one second to `ELECTION_SECONDS`."""
    ticks = round(min(max(1.0, shape.election_timeout), ELECTION_SECONDS) * 10)
    version = shape.api_version
    interval = _duration(max(0.1, shape.resolved_ts_interval))
    config: dict[str, Any] = {
        "memory-usage-limit": "1GiB",
        "log": {"level": "warn"},
        "server": {
            "grpc-concurrency": 2,
            # A label that nothing matches: which of how many.
            "labels": {"test": f"{index + 1}-of-{shape.stores}"},
        },
        "storage": {
            "api-version": 2 if version is ApiVersion.V2 else 1,
            "enable-ttl": version.has_ttl,
            "reserve-space": "0",
            "reserve-raft-space": "0",
            "block-cache": {"capacity": "64MiB"},
        },
        "raftstore": {
            "raft-base-tick-interval": "100ms",
            "raft-heartbeat-ticks": 2,
            "raft-election-timeout-ticks": ticks,
            "raft-store-max-leader-lease": _duration(min(9.0, ticks / 10 - 0.1)),
            "hibernate-regions": False,
            "capacity": "10GiB",
            "split-region-check-tick-interval": "1s",
            "pd-heartbeat-tick-interval": "1s",
            "pd-store-heartbeat-tick-interval": "1s",
        },
        "rocksdb": {
            "max-open-files": 1024,  # by default 40,960, here and below, which exceeds the limits of most machines
            "defaultcf": {"write-buffer-size": "16MiB"},
            "writecf": {"write-buffer-size": "16MiB"},
        },
        "raftdb": {"max-open-files": 1024},
        "readpool": {"unified": {"max-thread-count": 2}},
        "backup": {"num-threads": 2},
        "import": {"num-threads": 2},
        "resolved-ts": {"advance-ts-interval": interval},
        "cdc": {"min-ts-interval": interval},
        **_security(shape.tls, "ca-path", "cert-path", "key-path"),
    }
    if version is ApiVersion.V2:
        # A buffer of no time at all is not accepted.
        config["causal-ts"] = {"renew-interval": "100ms", "alloc-ahead-buffer": _duration(max(0.1, shape.ts_ahead))}
    return config


def _security(tls: TlsSettings | None, *names: str) -> dict[str, Any]:
    return {} if tls is None else {"security": dict(zip(names, (tls.ca, tls.cert, tls.key), strict=True))}


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def to_toml(config: Mapping[str, Any], prefix: str = "") -> str:
    """Write strings, numbers, booleans and tables of them."""
    plain = [f"{key} = {json.dumps(value)}\n" for key, value in config.items() if not isinstance(value, dict)]
    tables = [
        f"\n[{prefix}{key}]\n{to_toml(value, f'{prefix}{key}.')}"
        for key, value in config.items()
        if isinstance(value, dict)
    ]
    return "".join(plain + tables)


# --------------------------------------------------------------------------------------------------------- the watcher


_WATCH = """
import os, signal, sys
pids = set()
for line in sys.stdin:
    sign, pid = line[0], int(line[1:])
    (pids.add if sign == "+" else pids.discard)(pid)
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Watcher:
    """A process that kills those of which it was told, when this one ends: its standard input ends then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WATCH], stdin=subprocess.PIPE, text=True, start_new_session=True, bufsize=1
        )

    def add(self, pid: int) -> None:
        """Kill it in the end."""
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Leave it alone: it has ended, and another one may get its id."""
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()


_WATCHERS: list[Watcher] = []
_MAKING = threading.Lock()


def _watcher() -> Watcher:
    with _MAKING:
        if not _WATCHERS:
            _WATCHERS.append(Watcher())
        return _WATCHERS[0]
