"""A real etcd for tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import reserved_ports
from tests.support.tools import find_tool
from tikv_br.playground.etcd import EtcdServer
from tikv_br.playground.settings import TlsSettings


@contextlib.contextmanager
def real_etcd(folder: Path, tls: TlsSettings | None = None) -> Iterator[EtcdServer]:
    """Run an etcd with its data in `folder` for the length of the block; without the program the test ends."""
    with EtcdServer(folder, tls=tls, program=find()) as server:
        yield server


class Member:
    """One member of an etcd cluster, in a process of its own."""

    def __init__(self, program: str, folder: Path, name: str, port: int, cluster: str) -> None:
        self.address = f"127.0.0.1:{port}"
        peer = next(part.partition("=")[2] for part in cluster.split(",") if part.startswith(f"{name}="))
        client = f"http://{self.address}"
        self._command = [program, f"--name={name}", f"--data-dir={folder / name}", "--logger=zap"]
        self._command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        self._command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        self._command += [f"--initial-cluster={cluster}", "--heartbeat-interval=50", "--election-timeout=500"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; it answers a little later."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """End it as kill -9 does, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def etcd_cluster(folder: Path, size: int = 3) -> Iterator[list[Member]]:
    """Members of one cluster, each started; it may take a while until they agree on a leader."""
    with contextlib.ExitStack() as stack:
        ports = iter(stack.enter_context(reserved_ports(2 * size)))
        cluster = ",".join(f"m{number}=http://127.0.0.1:{next(ports)}" for number in range(size))
        members = [Member(find(), folder, f"m{number}", next(ports), cluster) for number in range(size)]
        for member in members:
            stack.callback(member.kill)
            member.start()
        yield members


def find() -> str:
    """The program; without it the test ends."""
    return find_tool("etcd", hint="run scripts/install_etcd.sh, or set ETCD_BINARY", variable="ETCD_BINARY")
