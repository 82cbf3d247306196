"""Many streams of answers read at once, by one consumer that never waits long."""

from __future__ import annotations

import queue
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.store import BackupStream
from tikv_br.errors import ClusterError

POLL_SECONDS = 0.2

Event: TypeAlias = "tuple[int, brpb_pb2.BackupResponse | ClusterError]"
"""The number of a stream, and an answer or the error that it ended with."""


def read_all(streams: Sequence[BackupStream], patience: float) -> Generator[Event | None]:
    """What comes of the streams, until all have ended; None now and then, so that the consumer can look about.

    Streams are cancelled when the consumer closes this early, and when none says anything for ``patience`` seconds.
    """
    arrived: queue.SimpleQueue[tuple[int, brpb_pb2.BackupResponse | ClusterError | None]] = queue.SimpleQueue()

    def read(number: int, stream: BackupStream) -> None:
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
                    for reader in readers:
                        if reader.done():
                            reader.result()  # whatever else a reader died of
                    if time.monotonic() - heard > patience:
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


def _cancel(streams: Sequence[BackupStream]) -> None:
    for stream in streams:
        stream.cancel()
