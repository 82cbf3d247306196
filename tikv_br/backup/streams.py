"""Many streams of answers read at once, by one consumer that never waits long."""

from __future__ import annotations

import queue
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import ClusterError

POLL_SECONDS = 0.2

Event: TypeAlias = "tuple[int, brpb_pb2.BackupResponse | ClusterError]"
"""The number of a stream, and an answer or the error that it ended with."""


class AnswerStream(Protocol):
    """Answers to one request: iterated once, in any thread."""

    @property
    def waiting(self) -> bool:
        """Whether it is not sent yet: then its silence means nothing."""

    def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]: ...

    def cancel(self) -> None:
        """End it; from any thread."""


def read_all(streams: Sequence[AnswerStream], patience: float) -> Generator[Event | None]:
    """What comes of the streams, until all have ended; None now and then, so that the consumer can look about.

    Streams are cancelled when the consumer closes this early, and when none says anything for ``patience`` seconds.
    """
    arrived: queue.SimpleQueue[tuple[int, brpb_pb2.BackupResponse | ClusterError | None]] = queue.SimpleQueue()

    def read(number: int, stream: AnswerStream) -> None:
        try:
            for answer in stream:
                arrived.put((number, answer))
        except ClusterError as error:
            arrived.put((number, error))
        arrived.put((number, None))

    with ThreadPoolExecutor(max(len(streams), 1), thread_name_prefix="answers") as pool:
        try:
            readers = [pool.submit(read, number, stream) for number, stream in enumerate(streams)]
            left, heard = len(streams), time.monotonic()
            while left:
                try:
                    number, said = arrived.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    _raise_deaths(readers)
                    if any(stream.waiting for stream in streams):
                        heard = time.monotonic()
                    elif time.monotonic() - heard > patience:
                        _cancel(streams)
                    yield None
                    continue
                heard = time.monotonic()
                if said is None:
                    left -= 1
                else:
                    yield number, said
        finally:
            _cancel(streams)


def _raise_deaths(readers: Sequence[Future[None]]) -> None:
    """Raise whatever else than its stream's error a reader died of."""
    for reader in readers:
        if reader.done():
            reader.result()


def _cancel(streams: Sequence[AnswerStream]) -> None:
    for stream in streams:
        stream.cancel()
