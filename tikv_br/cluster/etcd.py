"""A client of etcd v3, PD's own or another: keys, transactions and leases.

Calls go to one member until it fails, then to the next. A call is repeated only if that is harmless: for a
transaction whose answer got lost an error is raised, unless the caller declares it repeatable.

A lease of etcd that is kept alive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self, TypedDict, TypeVar

import grpc
from google.protobuf.message import Message
from msgspec import Struct

from tikv_br import cancellation, retry
from tikv_br.cancellation import BackgroundWork
from tikv_br.cluster.channel import has_answered, open_channel, run_in_worker_thread, status_of
from tikv_br.cluster.config import EtcdConfig, TlsFiles, explain_failure, split_address
from tikv_br.cluster.etcd_values import (
    Compare,
    Delete,
    Get,
    KeyValue,
    Listing,
    Operation,
    Put,
    TxnResult,
    from_range,
    from_txn,
    to_delete,
    to_put,
    to_range,
    to_txn,
)
from tikv_br.cluster.pb import etcdserverpb_pb2 as pb
from tikv_br.cluster.pb.etcdserverpb_pb2_grpc import AuthStub, KVStub, LeaseStub
from tikv_br.errors import ClusterTlsError, EtcdLeaseExpired, EtcdRefused, EtcdUnreachable, TikvBrError, UsageError

REQUEST_TIMEOUT = 5.0
RETRY_BUDGET = 15.0
CONNECT_SECONDS = 2.0
"""Timeout of the question which cluster a member is of."""
_OVERLOADED = "too many requests"
"""Text of etcd's refusal of a request that it did not execute. A full database has the same status, but no retry helps there."""
_OLD_TOKEN = "revision of auth store is old"  # noqa: S105 - what etcd says, no secret
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,  # no connection, no leader, leader changed, request timed out
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
    }
)
_NOT_SENT = ("failed to connect to all addresses", "dns resolution failed")
"""Prefix of gRPC's error text if the request was not sent; after other failures it may have taken effect."""


T = TypeVar("T")
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class Member(Struct, frozen=True):
    """One member of etcd and the stubs to call it."""

    address: str
    kv: KVStub
    lease: LeaseStub
    auth: AuthStub


class Etcd:
    """A connection to etcd. Thread-safe; a context manager that closes it."""

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: TlsFiles | None = None,
        *,
        user: str = "",
        password: str = "",
        request_timeout: float = REQUEST_TIMEOUT,
        retry_budget: float = RETRY_BUDGET,
    ) -> None:
        """`endpoints` are ``host:port`` of one etcd cluster. Nothing is sent yet. Times are in seconds.

        Raises `UsageError` for an address that is none.
        """
        for endpoint in endpoints:
            split_address(endpoint)
        if not endpoints:
            raise UsageError("no etcd address was passed")
        self.endpoints = tuple(endpoints)
        self._tls = tls or TlsFiles()
        self._user, self._password = user, password
        self._request_timeout, self._retry_budget = request_timeout, retry_budget
        self._lock = threading.Lock()
        self._closed = False
        self._channels = [open_channel(address, self._tls) for address in self.endpoints]
        self._members = [
            Member(address, KVStub(channel), LeaseStub(channel), AuthStub(channel))
            for address, channel in zip(self.endpoints, self._channels, strict=True)
        ]
        self._current = 0
        self._outage = retry.Outage(f"etcd {', '.join(self.endpoints)}", retry_budget)
        self._token = ""

    @classmethod
    def connect(
        cls, endpoints: Sequence[str], tls: TlsFiles | None = None, *, user: str = "", password: str = ""
    ) -> Self:
        """A connection that is known to work: some member answers, and takes the user and the password.

        Raises `EtcdUnreachable`, `EtcdRefused`, `ClusterTlsError`, `UsageError`.
        """
        etcd = cls(endpoints, tls, user=user, password=password)
        try:
            etcd.get("/tikv-br/")
            run_in_worker_thread(etcd._check_one_cluster)
        except BaseException:
            etcd.close()
            raise
        return etcd

    def _check_one_cluster(self) -> None:
        """Ask all members; those without an answer are tolerated. Raises `EtcdRefused` if they are of several clusters."""
        if len(self._members) == 1:
            return
        options: _CallOptions = {
            "timeout": cancellation.request_seconds(CONNECT_SECONDS),
            "metadata": (("token", self._token),) if self._token else None,
        }
        asked = [(each.address, each.kv.Range.future(to_range(Get("/tikv-br/")), **options)) for each in self._members]
        found: dict[int, str] = {}
        for address, answer in asked:
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
                found.setdefault(answer.result().header.cluster_id, address)
        if len(found) > 1:
            each = ", ".join(f"{address} of {cluster_id:x}" for cluster_id, address in found.items())
            raise EtcdRefused(
                f"the etcd addresses are of {len(found)} clusters: {each}", hint="Pass members of one cluster."
            )

    @classmethod
    def open(cls, config: EtcdConfig) -> Self:
        return cls.connect(config.endpoints, config.tls, user=config.user, password=config.password)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the connections; calls under way end with `EtcdUnreachable`."""
        self._closed = True
        run_in_worker_thread(lambda: [channel.close() for channel in self._channels])

    def is_alive(self, seconds: float) -> bool:
        """Return whether any member answers, if only with an error, within so many seconds."""

        def answers(call: grpc.Future[pb.RangeResponse]) -> bool:
            try:
                call.result()
            except grpc.RpcError as error:
                return has_answered(error)
            except grpc.FutureCancelledError:
                return False
            return True

        request = to_range(Get("/tikv-br/"))
        return any(map(answers, [each.kv.Range.future(request, timeout=seconds) for each in self._members]))

    def get(self, key: str) -> KeyValue | None:
        """A key as all members agree on it (linearizable); None where there is none."""
        listing = self._range(Get(key))
        return listing.items[0] if listing.items else None

    def range(self, prefix: str) -> Listing:
        """All keys with a prefix, in ascending order, as they stood at one revision."""
        return self._range(Get(prefix, prefix=True))

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write a key unconditionally; returns the revision. Raises `EtcdLeaseExpired` if the lease has expired."""
        return self._unary(lambda member: member.kv.Put, to_put(Put(key, value, lease))).header.revision

    def delete(self, key: str, *, prefix: bool = False) -> int:
        """Remove a key, or all keys with a prefix; returns how many there were."""
        return self._unary(lambda member: member.kv.DeleteRange, to_delete(Delete(key, prefix=prefix))).deleted

    def transact(
        self,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
        *,
        repeatable: bool = False,
    ) -> TxnResult:
        """Do `then` if all conditions hold, else `otherwise`, at once.

        `repeatable`: done twice it is as good as once, so that it is sent again when an answer got lost. Without it
        that raises `EtcdUnreachable` with ``outcome_unknown``: read what the keys are now.
        """
        request = to_txn(compares, then, otherwise)
        return from_txn(self._unary(lambda member: member.kv.Txn, request, repeatable=repeatable))

    def grant(self, ttl_seconds: int) -> int:
        """Create a lease; returns its id. If the answer gets lost, an unused lease remains until it expires."""
        return self._unary(lambda member: member.lease.LeaseGrant, pb.LeaseGrantRequest(TTL=ttl_seconds)).ID

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """Renew a lease; returns the seconds that it now has. Raises `EtcdLeaseExpired` if it has expired.

        `timeout`: seconds for this one try, instead of tries for as long as `retry_budget`.
        """
        request = pb.LeaseKeepAliveRequest(ID=lease)

        def send(member: Member, options: _CallOptions) -> int:
            stream = member.lease.LeaseKeepAlive(iter((request,)), **options)
            return next((answer.TTL for answer in stream), 0)

        ttl = self._call(send, "LeaseKeepAlive", timeout=timeout)
        if ttl <= 0:
            raise EtcdLeaseExpired(f"etcd lease {lease:x} has expired")
        return ttl

    def revoke(self, lease: int) -> None:
        """End a lease, and remove its keys; it need not exist."""
        with contextlib.suppress(EtcdLeaseExpired):
            self._unary(lambda member: member.lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=lease))

    def _range(self, operation: Get) -> Listing:
        return from_range(self._unary(lambda member: member.kv.Range, to_range(operation)))

    def _unary(
        self,
        pick: Callable[[Member], grpc.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        *,
        repeatable: bool = True,
    ) -> Response:
        def send(member: Member, options: _CallOptions) -> Response:
            return pick(member)(request, **options)

        return self._call(send, type(request).__name__.removesuffix("Request"), repeatable=repeatable)

    def _call(
        self,
        send: Callable[[Member, _CallOptions], T],
        what: str,
        *,
        repeatable: bool = True,
        timeout: float | None = None,
    ) -> T:
        """Send to the member that answered last, and to the others when it fails, within the retry budget."""
        policy = retry.RetryPolicy(self._retry_budget if timeout is None else 0.0, error=EtcdUnreachable)
        backoffer = retry.Backoffer(f"etcd {what}", policy)
        while True:
            index = self._current
            member = self._members[index]
            seconds = cancellation.request_seconds(timeout or self._request_timeout)
            try:
                with self._outage.asking():
                    answer = run_in_worker_thread(partial(self._authenticated, member, send, seconds))
            except grpc.RpcError as error:
                failure = self._explain(member, error)
            except ValueError:  # gRPC raises it for a closed channel
                if not self._closed:
                    raise
                failure = EtcdUnreachable(f"etcd {member.address}: the connection was closed")
            else:
                self._outage.end()
                return answer
            if isinstance(failure, EtcdUnreachable):
                self._outage.fail()
                self._switch_member(index)
                if failure.outcome_unknown and not repeatable:
                    raise failure
            if not failure.retryable or self._closed:
                raise failure
            backoffer.wait(retry.ETCD_UNAVAILABLE, failure)

    def _authenticated(self, member: Member, send: Callable[[Member, _CallOptions], T], timeout: float) -> T:
        """Send with a token, once more with a new one when the member no longer takes it: it restarted, or users changed."""
        if not self._user:
            return send(member, {"timeout": timeout, "metadata": None})
        token = self._token
        if token:
            try:
                return send(member, {"timeout": timeout, "metadata": (("token", token),)})
            except grpc.RpcError as error:
                code, details = status_of(error)
                if code is not grpc.StatusCode.UNAUTHENTICATED and _OLD_TOKEN not in details:
                    raise
        request = pb.AuthenticateRequest(name=self._user, password=self._password)
        self._token = member.auth.Authenticate(request, timeout=timeout).token
        return send(member, {"timeout": timeout, "metadata": (("token", self._token),)})

    def _switch_member(self, index: int) -> None:
        """Use the next member, unless another thread has already switched."""
        with self._lock:
            if self._current == index:
                self._current = (index + 1) % len(self._members)

    def _explain(self, member: Member, error: grpc.RpcError) -> TikvBrError:
        """Our error for a failed call; TLS errors are distinguished from missing answers."""
        code, details = status_of(error)
        who = f"etcd {member.address}"
        if "requested lease not found" in details:
            return EtcdLeaseExpired(f"{who}: the lease has expired")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return EtcdRefused(
                f"{who} does not support version 3 of the etcd protocol",
                hint="Pass --etcd HOST:PORT of an etcd v3 server: PD has one built in, the playground starts one with --etcd.",
            )
        if _OVERLOADED in details:
            return EtcdUnreachable(f"{who}: {details}")
        if code not in _TRANSIENT:
            return EtcdRefused(f"{who}: {details or code.name}")
        if code is grpc.StatusCode.UNAVAILABLE and details.startswith(_NOT_SENT):
            reason = explain_failure(*split_address(member.address), self._tls)
            if reason is not None:
                return ClusterTlsError(f"{who}: {reason}")
            return EtcdUnreachable(f"{who}: cannot connect")
        return EtcdUnreachable(f"{who}: {code.name}: {details}", outcome_unknown=True)


class _CallOptions(TypedDict):
    """Arguments of each call of a stub."""

    timeout: float
    metadata: tuple[tuple[str, str], ...] | None


log = logging.getLogger(__name__)


RENEWALS_PER_TTL = 3


def boot_clock() -> float:
    """Seconds since this machine started; it goes on while the process is stopped and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseHolder:
    """Holds a lease from entry to exit. Call `check` before each action that the lease protects.

    The lease is counted from when its last confirmed renewal was *sent*: etcd counts from a later moment, so it ends first
    by our count, and a process that was suspended notices it.
    """

    def __init__(self, etcd: Etcd, ttl_seconds: int, *, clock: Callable[[], float] = boot_clock) -> None:
        """`ttl_seconds` is how long it outlasts us."""
        self._etcd = etcd
        self._ttl = ttl_seconds
        self._clock = clock
        self._gone = False
        self._renewal = BackgroundWork("etcd-lease", self._keep)
        self.lease = 0
        """Id of the lease; pass it with `put` to attach keys."""
        self.deadline = 0.0
        """Time on `clock` at which the lease expires unless it is renewed."""

    def __enter__(self) -> Self:
        """Get the lease. Raises `EtcdError`."""
        asked = self._clock()
        self.lease = self._etcd.grant(self._ttl)
        self.deadline = asked + self._ttl
        self._renewal.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """End the lease, so that others need not wait for it; without waiting long for etcd ourselves."""
        self._gone = True
        try:
            with cancellation.clean_up(time.monotonic()):
                self._renewal.stop()
                self._etcd.revoke(self.lease)
        except TikvBrError as error:  # also of TLS
            log.warning("cannot revoke the etcd lease, which expires within %d s: %s", self._ttl, error.message)

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is ours, if nothing is heard of etcd; not above 0 when it is not."""
        return 0.0 if self._gone else self.deadline - self._clock()

    def check(self) -> None:
        """Raise `EtcdLeaseExpired` once the lease may have ended: others may then do what it stood for."""
        if self.remaining <= 0:
            raise EtcdLeaseExpired(f"etcd lease {self.lease:x} was not renewed within its TTL of {self._ttl} s")

    def _keep(self) -> None:
        pause = every = self._ttl / RENEWALS_PER_TTL
        while not self._gone:
            cancellation.sleep(pause)
            pause = every
            asked = self._clock()
            try:
                ttl = self._etcd.keep_alive(self.lease, every)
            except EtcdLeaseExpired:
                self._gone = True
            except TikvBrError as error:  # also of TLS
                log.warning("cannot renew the etcd lease: %s", error.message)
                pause = every / 10
            else:
                self.deadline = asked + ttl
