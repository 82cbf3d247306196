"""Playgrounds for benches of whole commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from tests.support.live_cluster import LiveCluster


@contextlib.contextmanager
def together(*clusters: AbstractContextManager[LiveCluster]) -> Iterator[list[LiveCluster]]:
    """Start several at once, which takes little longer than one; they end with the block."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(clusters)) as pool:
        yield list(pool.map(stack.enter_context, clusters))
