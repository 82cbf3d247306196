"""gRPC channels to PD and stores, and the errors of failed calls."""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar, cast

import grpc

from tikv_br.cluster.config import TlsFiles
from tikv_br.errors import (
    ApiVersionMismatch,
    ClusterError,
    ClusterTlsError,
    ClusterUnfit,
    ClusterUnreachable,
    RequestRefused,
)

T = TypeVar("T")
GRACE = 0.5
"""Seconds that an action still has to end once a signal has come."""


def run_in_worker_thread(action: Callable[[], T]) -> T:
    """Run `action`, in another thread if this is the main one; returns what it returns, raises what it raises.

    A signal that raises ends the wait, at most `GRACE` seconds later. An action that is still running then continues in its
    thread until the connection that it uses is closed.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return action()
    ended: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found = action()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
            ended.put(lambda: _raise(failure))
        else:
            ended.put(lambda: found)

    _worker().put(run)
    try:
        outcome = _await(ended)
    except BaseException:  # a signal: what the caller undoes should not meet what is still being done
        with contextlib.suppress(queue.Empty):
            ended.get(timeout=GRACE)
        raise
    return outcome()


def _await(ended: queue.SimpleQueue[T]) -> T:
    """Wait in short steps: a signal that comes just before a wait is handled only after it."""
    while True:
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=GRACE)


Inbox = queue.SimpleQueue[Callable[[], None]]
_idle: queue.SimpleQueue[Inbox] = queue.SimpleQueue()
"""Calls to run, each in a thread of its own that ends with the process."""


def _worker() -> Inbox:
    with contextlib.suppress(queue.Empty):
        return _idle.get_nowait()
    inbox: Inbox = queue.SimpleQueue()
    _thread.start_new_thread(_serve, (inbox,))  # `threading.Thread` waits for its start with locks that a signal breaks
    return inbox


def _serve(inbox: Inbox) -> None:
    while True:
        inbox.get()()
        _idle.put(inbox)


def _drop_parent_threads() -> None:
    global _idle  # noqa: PLW0603 - a forked child has none of its parent's threads
    _idle = queue.SimpleQueue()


os.register_at_fork(after_in_child=_drop_parent_threads)


def _raise(error: BaseException) -> NoReturn:
    raise error


class CallUnsupported(ClusterUnfit):
    """The server does not know this call: it is too old, or built without it."""


class FailedUnknown(RequestRefused):
    """gRPC's status for what has no other: a server's refusal, or something between us and it that has broken."""


CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # The limit on answers is the channel's own: change events go far beyond gRPC's default of 4 MiB.
    ("grpc.max_send_message_length", -1),
    # Find a dead peer in seconds, in a minute with a stream open. No pings without a call: PD counts those as abuse and disconnects.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # A wide window from the first byte, for stores some milliseconds away; on loopback it makes no difference.
    ("grpc.http2.lookahead_bytes", 16 << 20),
    # A store that comes back is tried again soon, not after gRPC's two minutes. "Min" is what one attempt may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Retries are ours (retry.py); proxies are for the web.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)

STATUS_ERRORS: Mapping[grpc.StatusCode, type[ClusterError]] = {
    grpc.StatusCode.OK: RequestRefused,  # a failure that says OK: never seen, never retried
    grpc.StatusCode.CANCELLED: ClusterUnreachable,
    grpc.StatusCode.UNKNOWN: FailedUnknown,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.DEADLINE_EXCEEDED: ClusterUnreachable,
    grpc.StatusCode.NOT_FOUND: RequestRefused,
    grpc.StatusCode.ALREADY_EXISTS: RequestRefused,
    grpc.StatusCode.PERMISSION_DENIED: ClusterTlsError,  # the server's list of certificate names
    grpc.StatusCode.RESOURCE_EXHAUSTED: ClusterUnreachable,
    grpc.StatusCode.FAILED_PRECONDITION: ClusterUnfit,  # "mismatch cluster id"
    grpc.StatusCode.ABORTED: ClusterUnreachable,
    grpc.StatusCode.OUT_OF_RANGE: RequestRefused,
    grpc.StatusCode.UNIMPLEMENTED: CallUnsupported,
    grpc.StatusCode.INTERNAL: ClusterUnreachable,
    grpc.StatusCode.UNAVAILABLE: ClusterUnreachable,
    grpc.StatusCode.DATA_LOSS: RequestRefused,
    grpc.StatusCode.UNAUTHENTICATED: ClusterTlsError,
}
"""The class of each status. `ClusterUnreachable` is the retryable one; so is `FailedUnknown` for RawKV."""

_NOT_CONNECTED = ("failed to connect", "errors resolving", "dns resolution failed")
"""Substrings of gRPC's error texts for a connection that was never established; gRPC has no status code for it."""
_UNRESOLVED = _NOT_CONNECTED[1:]
_NO_CONNECTION = re.compile(
    r"failed to connect to all addresses; last error: (?:\w+: )?(?:ipv[46]:\S+: )?(?:Failed to connect to remote host: )?(.+)"
)
"""gRPC's text with the address, which messages name themselves, and the cause."""
_TLS_WORDS = ("handshake", "certificate", "ssl", "tsi_")


def open_channel(
    address: str, tls: TlsFiles, largest_answer: int = -1, *, own_connection: bool = False
) -> grpc.Channel:
    """A channel to ``host:port``; it connects with the first call. Raises `UsageError` for unreadable TLS files.

    A call whose answer has more than ``largest_answer`` bytes (-1: no limit) ends with RESOURCE_EXHAUSTED. Channels
    share connections, and with them the window of flow control; one with ``own_connection`` does not.
    """
    options = (
        *CHANNEL_OPTIONS,
        ("grpc.max_receive_message_length", largest_answer),
        ("grpc.use_local_subchannel_pool", int(own_connection)),
    )
    if not tls.enabled:
        return grpc.insecure_channel(address, options=options)
    ca, cert, key = tls.read()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.secure_channel(address, credentials, options=options)


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    call = cast("grpc.Call", error)  # what stubs raise is both
    return call.code(), call.details() or ""


def has_answered(error: grpc.RpcError) -> bool:
    """Whether a failed call reached a server: it answered with an error or closed the connection."""
    code, details = status_of(error)
    lowered = details.lower()
    silent = code in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
    return not silent and not any(sign in lowered for sign in _NOT_CONNECTED)


def to_cluster_error(error: grpc.RpcError, who: str, tls: TlsFiles) -> ClusterError:
    """Our error for a failed call to `who`, such as ``store 4 (host:port)``; TLS errors are distinguished from missing answers."""
    code, details = status_of(error)
    if code is grpc.StatusCode.UNAVAILABLE and tls.enabled and _mentions_tls(details):
        return ClusterTlsError(f"{who}: the TLS handshake failed: {details}")
    if "IncompatibleApiVersion" in details:
        return ApiVersionMismatch(f"{who}: {details}")
    if any(sign in details.lower() for sign in _UNRESOLVED):
        return STATUS_ERRORS[code](
            f"{who}: the name does not resolve here; if it is one that the cluster advertises, run tikv-br where it resolves, or add it "
            "to /etc/hosts"
        )
    if refused := _NO_CONNECTION.fullmatch(details):
        return STATUS_ERRORS[code](f"{who}: {refused[1]}")
    return STATUS_ERRORS[code](f"{who}: {code.name}: {details}" if details else f"{who}: {code.name}")


def _mentions_tls(details: str) -> bool:
    lowered = details.lower()
    return any(word in lowered for word in _TLS_WORDS)
