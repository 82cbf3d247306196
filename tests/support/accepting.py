"""A server that takes connections, and no more than that."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def accepting(greet: Callable[[socket.socket], object]) -> Iterator[str]:
    """Its address. Each connection is greeted in the server's own thread, and stays open until the end."""
    over = threading.Event()
    with contextlib.ExitStack() as kept, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def serve() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    greet(kept.enter_context(listener.accept()[0]))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join()
