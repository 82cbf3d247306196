"""Faults at the start of a command, with their codes in docs/exit-codes.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

from tests.integration.truth.calls import CALLS
from tikv_br.cli.command import CommandPath

if TYPE_CHECKING:
    from tests.integration.truth.conftest import World

AWAY = "127.0.0.1:1"
CHECK: CommandPath = ("check",)
"""Reports whatever is wrong as a failed probe; a drill begins with the same probes."""
DRILL: CommandPath = ("drill", "run")
NOT_DRILL = tuple(path for path in CALLS if path != DRILL)
RESTORES: tuple[CommandPath, ...] = (
    ("restore", "raw"),
    ("restore", "raw", "--log"),
    ("restore", "point"),
    ("restore", "txn"),
)
NEEDS_V2: tuple[CommandPath, ...] = (
    ("sync",),
    ("changefeed", "create"),
    ("changefeed", "capture"),
    ("log", "start"),
    ("gc", "run"),
    ("backup", "raw", "--base"),
)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    name: str
    code: int
    instead: Callable[[World], Mapping[str, str]]
    """Other things instead of some that `CALLS` names; commands that name none of them are not concerned."""
    more: tuple[str, ...] = ()
    others: Mapping[CommandPath, int] = field(default_factory=dict)
    """Codes of commands for which it means something else; 0 = they do not mind it."""

    only: Collection[CommandPath] = tuple(CALLS)
    """For which commands it is a fault at all."""

    def __str__(self) -> str:
        return self.name

    def concerned(self, world: World) -> list[CommandPath]:
        """The commands that meet it."""
        names = [f"{{{name}}}" for name in self.instead(world)]
        return [path for path in self.only if any(name in CALLS[path] for name in names)]

    def code_of(self, command: CommandPath) -> int:
        """Exit code that a command must have."""
        return self.others.get(command, self.code)


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """An S3 endpoint that says 403 AccessDenied to everything."""

    class Handler(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            # If it stayed unread, the kernel would reset the connection, and the answer might be lost.
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = refuse  # noqa: N815 - the base class's

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


PLACES = ("new", "exported", "increment", "merged", "sound", "txn", "log", "begun", "folder", "home")
FAULTS = (
    Fault(
        "PD is away",
        3,
        lambda _world: {"pd": AWAY, "target": AWAY},
        others={CHECK: 61, DRILL: 61},
    ),
    Fault("etcd is away", 80, lambda _world: {"etcd": AWAY}),
    Fault("Kafka is away", 83, lambda _world: {"kafka": AWAY}),
    Fault(
        "cluster of another kind",
        5,
        lambda world: {"pd": world.other.pd, "target": world.other.pd},
        # Any cluster can be backed up, asked and written to; the group of another cluster is another group.
        only=(*RESTORES, *NEEDS_V2, ("backup", "txn"), ("diff",), ("log", "end")),
        others={**dict.fromkeys(RESTORES, 6), ("diff",): 60, ("log", "end"): 2},
    ),
    Fault(
        "storage refuses",
        21,
        lambda _world: {name: f"s3://bucket/{name}" for name in PLACES},
        more=("--s3.endpoint", "{s3}"),
        others={CHECK: 61},
    ),
    Fault(
        "storage is missing",
        31,
        lambda world: dict.fromkeys(("sound", "txn", "log", "folder", "begun"), world.names["nothing"]),
        only=NOT_DRILL,
        # What is not there needs no clean-up and holds no lock.
        others=dict.fromkeys([("backup", "abort"), ("backup", "unlock")], 0),
    ),
    Fault(
        "place cannot be written",
        23,
        lambda world: dict.fromkeys(
            ("new", "exported", "increment", "merged", "home", "state", "dir"), f"{world.names['config']}/x"
        ),
        # Nothing is there, nothing runs there: that is what these tell.
        others={
            CHECK: 61,
            ("drill", "list"): 0,
            ("drill", "show"): 31,
            ("backup", "delete"): 31,
            ("playground", "start"): 53,
            ("playground", "stop"): 0,
            ("playground", "status"): 0,
        },
    ),
    Fault(
        "backup is damaged",
        32,
        lambda world: {"sound": world.names["damaged"]},
        # They read the records only: what those say of the rows is compared, or shown.
        others={("diff",): 0, ("show",): 0, ("show", "--log"): 0},
        # So does an incremental backup, which is then a sound one on a damaged one: `verify` says so.
        only=tuple(path for path in CALLS if path != ("backup", "raw", "--base")),
    ),
)
