"""Stand-ins for ``pd-server`` and ``tikv-server``: they take the command line and the configuration file that the real ones get.

They show that the provider of real servers starts, waits for, kills, freezes and ends processes, in places where there are no real servers.
The first ``pd-server`` of a cluster starts a process that runs a playground with all members of PD and all stores, on the ports of the command lines;
each stand-in then only holds a connection to it. When a stand-in dies, its server in the playground dies, and while it is stopped by
SIGSTOP, its server answers nothing. The playground ends with the last stand-in.

``python -m tests.real.stand_in pd|tikv|cluster ...``
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
LEASE_SECONDS = 1.0
ALONE_SECONDS = 10.0
"""After which a cluster ends that no stand-in has connected to: all may have been killed before."""
VERSION = "Release Version:   {} (a stand-in: a playground)"


def main(arguments: list[str]) -> None:
    """Be the server of that name."""
    kind, *words = arguments
    if kind == "cluster":
        _run_cluster(words[0])
    elif {"-V", "--version"} & set(words):
        from tikv_br.playground.settings import RECORDED

        sys.stdout.write(VERSION.format(RECORDED.tikv if kind == "tikv" else f"v{RECORDED.pd}") + "\n")
    else:
        flags = {word.partition("=")[0].removeprefix("--"): word.partition("=")[2] for word in words}
        config = tomllib.loads(Path(flags["config"]).read_text())
        if "config-check" in flags:
            sys.stdout.write("config check successful\n")
            return
        Path(flags["data-dir"]).mkdir(exist_ok=True)
        (_pd if kind == "pd" else _tikv)(flags, config)


def _pd(flags: dict[str, str], config: dict[str, Any]) -> None:
    peers = [each.partition("=") for each in flags["initial-cluster"].split(",")]
    names = [name for name, _, _ in peers]
    meeting = _port(peers[0][2])
    client = _port(flags["client-urls"])
    if flags["name"] == names[0] and not _answers(meeting):
        subprocess.Popen(
            [sys.executable, "-m", "tests.real.stand_in", "cluster", str(meeting)],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
        )
    about = {
        "index": names.index(flags["name"]),
        "members": len(names),
        "client": client,
        "voters": config["replication"]["max-replicas"],
        "balance": config["schedule"]["region-schedule-limit"] > 0,
        "directory": str(Path(flags["data-dir"]).parent / "playground"),
    }
    _hold(meeting, "pd", about)


def _tikv(flags: dict[str, str], config: dict[str, Any]) -> None:
    index, _, count = config["server"]["labels"]["test"].partition("-of-")
    storage, raft = config["storage"], config["raftstore"]
    security = config.get("security", {})
    ahead = config.get("causal-ts", {}).get("alloc-ahead-buffer", "3000ms")
    about = {
        "index": int(index) - 1,
        "stores": int(count),
        "address": flags["addr"],
        "status": flags["status-addr"],
        "version": "V2" if storage["api-version"] == 2 else "V1TTL" if storage["enable-ttl"] else "V1",
        "election_timeout": raft["raft-election-timeout-ticks"] * _seconds(raft["raft-base-tick-interval"]),
        "resolved_ts_interval": _seconds(config["cdc"]["min-ts-interval"]),
        "ts_ahead": _seconds(ahead),
        "tls": [security["ca-path"], security["cert-path"], security["key-path"]] if security else None,
    }
    _hold(_port(flags["pd-endpoints"].split(",")[0]), "tikv", about)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _seconds(text: str) -> float:
    return int(text.removesuffix("ms")) / 1000


def _name(port: int) -> str:
    """Where a cluster listens: an abstract socket, of which no file stays."""
    return f"\0tikv-br-stand-in-{port}"


def _answers(port: int) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(_name(port)) == 0


def _hold(port: int, kind: str, about: dict[str, Any]) -> None:
    """Tell the cluster who this is, and stay connected until a signal, or until it ends."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    deadline = time.monotonic() + PATIENCE
    with socket.socket(socket.AF_UNIX) as connection:
        while connection.connect_ex(_name(port)) != 0:
            if time.monotonic() > deadline:
                sys.exit(f"no cluster listens at {port}")
            time.sleep(0.02)
        connection.sendall(json.dumps({"kind": kind, "pid": os.getpid(), **about}).encode() + b"\n")
        connection.recv(1)
    sys.exit("the playground has ended")


# ---------------------------------------------------------------------------------------------------------- the cluster


class _Cluster:
    """The playground, made once all stores are there, and what dies and returns in it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pds: dict[int, dict[str, Any]] = {}
        self._stores: dict[int, dict[str, Any]] = {}
        self._living = 0
        self._playground: Any = None
        self._frozen: dict[tuple[str, int], int] = {}
        self._closed: dict[int, Any] = {}
        """Ports of dead members of PD, which stay reserved."""

    def listen(self, port: int) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_name(port))
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def is_alone(self) -> bool:
        """Whether no stand-in is connected."""
        with self._lock:
            return not self._living

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile() as lines:
            first = lines.readline()
            if not first:
                return
            about = json.loads(first)
            key = about["kind"], about["index"]
            with self._lock:
                self._living += 1
                self._came(about)
            watching = threading.Event()
            threading.Thread(target=self._watch, args=(about, watching), daemon=True).start()
            with contextlib.suppress(ConnectionError):
                lines.readline()
            watching.set()
            with self._lock:
                self._thaw(key)
                self._went(*key)
                self._living -= 1
                if not self._living:
                    os._exit(0)

    def _watch(self, about: dict[str, Any], ended: threading.Event) -> None:
        """Look whether the process is stopped by a signal."""
        key = about["kind"], about["index"]
        while not ended.wait(0.05):
            try:
                stopped = Path(f"/proc/{about['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            except FileNotFoundError:
                return
            with self._lock:
                if stopped and key not in self._frozen and self._playground is not None:
                    store = self._store_id(key[1]) if key[0] == "tikv" else 0
                    delay = {"rpc": "*", "action": {"delay": {"seconds": 3600}}, "store_id": store, "count": -1}
                    self._frozen[key] = self._playground.failpoints.add(delay).id
                elif not stopped:
                    self._thaw(key)

    def _thaw(self, key: tuple[str, int]) -> None:
        if (failpoint := self._frozen.pop(key, None)) is not None:
            self._playground.failpoints.remove(failpoint)

    def _came(self, about: dict[str, Any]) -> None:
        kind, index = about["kind"], about["index"]
        (self._pds if kind == "pd" else self._stores)[index] = about
        if self._playground is not None:
            if kind == "tikv":
                self._playground.restart_store(self._store_id(index))
            else:
                self._reopen(index)
            return
        if kind == "pd":
            self.listen(about["client"])
        if self._pds and self._stores:
            members, stores = next(iter(self._pds.values())), next(iter(self._stores.values()))
            if len(self._pds) == members["members"] and len(self._stores) == stores["stores"]:
                self._start()

    def _went(self, kind: str, index: int) -> None:
        if self._playground is None:
            return
        if kind == "tikv":
            self._playground.kill_store(self._store_id(index))
            return
        from tikv_br.playground.servers import ReservedPort

        pd, state = self._playground._pd, self._playground.state
        front = pd._fronts[index]
        front.close()
        self._closed[index] = ReservedPort(front.port)
        state.died = index
        if state.leader not in {None, index}:
            return
        if state.leader is not None:
            state.end_leadership()
        state.tso.available = False
        if others := sorted(set(self._pds) - set(self._closed)):
            time.sleep(LEASE_SECONDS)
            self._lead(others[0])

    def _reopen(self, index: int) -> None:
        """A member of PD is there again; if nobody leads, it does."""
        from tikv_br.playground.pd_server import Front
        from tikv_br.playground.servers import LOOPBACK

        pd, state = self._playground._pd, self._playground.state
        front = pd._fronts[index]
        tls = self._playground.settings.tls
        pd._fronts[index] = Front(f"{LOOPBACK}:{front.port}", front.grpc_port, front.http_port, tls)
        self._closed.pop(index).close()
        state.died = next(iter(self._closed), None)
        if state.leader is None:
            self._lead(index)

    def _lead(self, index: int) -> None:
        self._playground.state.lead(index)
        self._playground.state.tso.available = True

    def _store_id(self, index: int) -> int:
        return int(list(self._playground.nodes)[index])

    def _start(self) -> None:
        from tests.real.operators import OperatorApi
        from tikv_br.formats.api_version import ApiVersion
        from tikv_br.playground.cluster import open_playground
        from tikv_br.playground.settings import TlsSettings

        pd, store = self._pds[0], self._stores[0]
        directory = Path(pd["directory"])
        directory.mkdir()
        playground = open_playground(
            directory,
            api_version=ApiVersion[store["version"]].value,
            stores=store["stores"],
            replicas=pd["voters"],
            pd_members=pd["members"],
            pd_port=pd["client"],
            balance=pd["balance"],
            keyspace_split_delay=0.0,
            election_timeout=store["election_timeout"],
            resolved_ts_interval=store["resolved_ts_interval"],
            ts_ahead=store["ts_ahead"],
            tls=TlsSettings(*store["tls"]) if store["tls"] else None,
        )
        for index, node in enumerate(playground.nodes.values()):
            node.address, node.status_address = self._stores[index]["address"], self._stores[index]["status"]
        playground._identity["ports"] |= {
            f"pd{index + 1}": member["client"] for index, member in self._pds.items() if index
        }
        playground._pd._api = OperatorApi(playground)
        playground.start()
        self._playground = playground


def _run_cluster(port: str) -> None:
    cluster = _Cluster()
    cluster.listen(int(port))
    time.sleep(ALONE_SECONDS)
    if cluster.is_alone():
        return
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
