"""The connection from tasks to the driver: Spark's own accumulators arrive only when a task has ended.

A connection begins with a challenge, and every message is signed, because outcomes are pickles, and the network of a cluster is not
trusted. A connection that says nothing, as of a port scanner, keeps only its own thread.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import pickle
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Self

from tikv_br.tasks.task import TaskMessage

logger = logging.getLogger(__name__)
_DIGEST = "sha256"
_DIGEST_SIZE = 32
_QUEUE_BOUND = 1000
_HANDSHAKE_SECONDS = 30.0
ANY_HOST = "0.0.0.0"  # noqa: S104 - a cluster's executors connect from elsewhere, with the key


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Address of the driver and key of this run; travels to the tasks inside Spark's own (trusted) closure."""

    host: str
    port: int
    key: bytes

    def answer(self, challenge: bytes) -> bytes:
        """Return a proof of knowing the key. It differs from a message's signature, which uses the key itself."""
        return hmac.digest(hmac.digest(self.key, b"connection", _DIGEST), challenge, _DIGEST)


class ProgressListener:
    """The driver's end: hands every message to ``receive``, from threads of its own. A context manager."""

    def __init__(
        self, receive: Callable[[TaskMessage], None], host: str = "127.0.0.1", advertise: str | None = None
    ) -> None:
        key = secrets.token_bytes(32)
        self._receive = receive
        self._host = host
        self._listener = Listener((host, 0), backlog=64)
        port: int = self._listener.address[1]
        self.address = ChannelAddress(advertise or host, port, key)
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, name="progress-accept", daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        host = "127.0.0.1" if self._host == ANY_HOST else self._host
        with contextlib.suppress(OSError):
            Client((host, self.address.port)).close()  # wakes accept
        self._accepting.join(timeout=2)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    logger.debug("a connection to the progress listener failed: %s", error)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="progress-read", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            if self._is_task(connection):
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                packet = connection.recv_bytes()
            except (EOFError, OSError):
                return
            signature, payload = packet[:_DIGEST_SIZE], packet[_DIGEST_SIZE:]
            if not hmac.compare_digest(signature, hmac.digest(self.address.key, payload, _DIGEST)):
                logger.warning("dropped a progress message with a wrong signature and closed its connection")
                return
            self._receive(pickle.loads(payload))  # noqa: S301 - signed by a task of this run

    def _is_task(self, connection: Connection) -> bool:
        challenge = secrets.token_bytes(_DIGEST_SIZE)
        try:
            connection.send_bytes(challenge)
            answer = connection.recv_bytes(_DIGEST_SIZE) if connection.poll(_HANDSHAKE_SECONDS) else b""
        except (EOFError, OSError):
            return False
        return hmac.compare_digest(answer, self.address.answer(challenge))


class ProgressSender:
    """A task's end, one for each Python worker and run: a thread sends, so that the task itself never waits on the driver.

    What cannot be sent is dropped: outcomes return with the task as well, progress is only shown.
    """

    def __init__(self, address: ChannelAddress) -> None:
        self._address = address
        self._queue: queue.Queue[TaskMessage] = queue.Queue(_QUEUE_BOUND)
        self._lost = False
        threading.Thread(target=self._run, name="progress-send", daemon=True).start()

    def send(self, message: TaskMessage) -> None:
        """Queue a message; drops it when the queue is full or the driver is lost."""
        if not self._lost:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(message)

    def _run(self) -> None:
        try:
            with Client((self._address.host, self._address.port)) as connection:
                connection.send_bytes(self._address.answer(connection.recv_bytes(_DIGEST_SIZE)))
                while True:
                    payload = pickle.dumps(self._queue.get())
                    connection.send_bytes(hmac.digest(self._address.key, payload, _DIGEST) + payload)
        except (OSError, EOFError) as error:
            self._lost = True
            logger.debug("cannot report progress: the connection to the driver is lost: %s", error)


class RunSender:
    """The sender of the run that this process works for: Spark uses a worker process for many tasks, and for later runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address: ChannelAddress | None = None

    def to(self, address: ChannelAddress) -> ProgressSender:
        """The sender to this address; replaces the one of an earlier run."""
        with self._lock:
            if self._address != address:
                self._address, self._sender = address, ProgressSender(address)
            return self._sender
