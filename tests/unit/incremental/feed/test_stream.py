"""Items that the reader of a stream puts into the inbox."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import cast

from tikv_br.cluster.store import EventFeed
from tikv_br.incremental.feed.stream import (
    MESSAGE_OVERHEAD,
    Inbox,
    LocatedRegions,
    StoreStream,
    StreamEnd,
    StreamMessages,
)

LIMIT = 100_000
PATIENCE = 60.0


class SmallMessages:
    """A call whose store sends many messages of one row."""

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(LIMIT):
            yield b"x" * 40

    def cancel(self) -> None:
        """Nothing to end."""


def test_small_messages_count_with_all_that_they_take() -> None:
    """Most memory of thousands of waiting rows is overhead, which the bound includes."""
    inbox: Inbox[StreamMessages | StreamEnd | LocatedRegions] = Inbox(LIMIT)
    stream = StoreStream(cast("EventFeed", SmallMessages()), inbox, cluster_id=1)
    until = time.monotonic() + PATIENCE
    while inbox.bytes < LIMIT - 2 * MESSAGE_OVERHEAD and time.monotonic() < until:
        time.sleep(0.01)
    waiting = inbox.get(0, most=LIMIT)
    inbox.close()
    stream.join(PATIENCE)
    assert 0 < len(waiting) <= LIMIT // MESSAGE_OVERHEAD
