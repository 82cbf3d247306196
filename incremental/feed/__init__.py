"""The feed: all changes of a span, as batches of rows, and how far they are complete.

`coverage` keeps the span without a hole, `decode` reads events, `stream` and `locator` do the I/O, each in threads of
their own, and `feed` puts it together in the thread of whoever iterates.
"""

from __future__ import annotations

from incremental.feed.feed import Feed
from incremental.feed.options import FeedOptions
from incremental.feed.outputs import Event, Resolved, Rows
from incremental.feed.status import FeedStatus

__all__ = ["Event", "Feed", "FeedOptions", "FeedStatus", "Resolved", "Rows"]
