"""The connection to PD's leader, which is found again after a leader change.

The errors of PD: in the headers of its answers, and of servers that are not PD.
"""

from __future__ import annotations

import functools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeAlias, TypeVar

import grpc
from msgspec import Struct

from tikv_br import cancellation, retry
from tikv_br.cluster.channel import has_answered, open_channel, run_in_worker_thread, status_of, to_cluster_error
from tikv_br.cluster.config import ClusterConfig, bare_address, explain_failure, split_address
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.cluster.pb.keyspacepb_pb2_grpc import KeyspaceStub
from tikv_br.cluster.pb.pdpb_pb2_grpc import PDStub
from tikv_br.errors import ClusterError, ClusterTlsError, ClusterUnfit, ClusterUnreachable, RequestRefused

HEADER_ERRORS: Mapping[int, type[ClusterError]] = {
    pdpb_pb2.UNKNOWN: RequestRefused,
    pdpb_pb2.NOT_BOOTSTRAPPED: ClusterUnfit,
    pdpb_pb2.STORE_TOMBSTONE: RequestRefused,
    pdpb_pb2.ALREADY_BOOTSTRAPPED: RequestRefused,
    pdpb_pb2.INCOMPATIBLE_VERSION: ClusterUnfit,
    pdpb_pb2.REGION_NOT_FOUND: ClusterUnreachable,  # a moment later PD may know it
    pdpb_pb2.GLOBAL_CONFIG_NOT_FOUND: RequestRefused,
    pdpb_pb2.DUPLICATED_ENTRY: RequestRefused,
    pdpb_pb2.ENTRY_NOT_FOUND: RequestRefused,
    pdpb_pb2.INVALID_VALUE: RequestRefused,
    pdpb_pb2.DATA_COMPACTED: RequestRefused,
    pdpb_pb2.REGIONS_NOT_CONTAIN_ALL_KEY_RANGE: ClusterUnreachable,
}
"""The class of each error that a response header can carry."""

_LEADER_CHANGE = ("not leader", "ErrGenerateTimestamp", "[PD:etcd:", "etcdserver: ", "server not started")
"""Substrings of error texts while the leader of PD or of its etcd changes: another member can answer."""
_BAD_COUNT = "count should be positive"
"""Text of an `ErrGenerateTimestamp` caused by the request itself; not retried."""


class NoLeaderYet(ClusterUnreachable):
    """Some member is there, and none knows a leader: an election, or a member that is starting."""


class NotPd(ClusterUnreachable):
    """Another server listens at the address, such as one of HTTP, or a store."""

    retryable = False
    default_hint = "Pass the address of a PD member with --pd; PD listens at port 2379 by default."


NO_HTTP2 = "Failed parsing HTTP/2"
"""Substrings of gRPC's error texts for a server that does not speak HTTP/2."""


def check_header(error: pdpb_pb2.Error, who: str) -> None:
    """Raise what `HEADER_ERRORS` says for the error in an answer's header, if there is one; ``who`` has sent it."""
    if error.type == pdpb_pb2.OK:
        return
    error_class = HEADER_ERRORS.get(error.type, RequestRefused)
    if error.type == pdpb_pb2.UNKNOWN and is_passing(error.message):
        error_class = ClusterUnreachable
    raise error_class(f"{who}: {error.message or pdpb_pb2.ErrorType.Name(error.type)}")


def is_passing(message: str) -> bool:
    """Whether an error text is one of a leader change."""
    return any(text in message for text in _LEADER_CHANGE) and _BAD_COUNT not in message


def no_answer(messages: Mapping[str, str]) -> ClusterUnreachable:
    """The error for members that do not answer, by their addresses; a cause that all share is named once."""
    causes = {address: message.removeprefix(f"PD {address}: ") for address, message in messages.items()}
    if len(set(causes.values())) == 1:
        return ClusterUnreachable(f"no PD answers at {', '.join(causes)}: {next(iter(causes.values()))}")
    return ClusterUnreachable(
        f"no PD answers: {', '.join(f'at {address}: {cause}' for address, cause in causes.items())}"
    )


class Leader(Struct, frozen=True):
    """PD's leader and the stubs to call it."""

    address: str
    url: str
    """Address that PD advertises, with ``http://`` or ``https://``."""
    pd: PDStub
    keyspace: KeyspaceStub


class _Member(Struct, frozen=True):
    """A connection to a member, with its stubs: creating them on a channel that is being closed would crash the process."""

    channel: grpc.Channel
    pd: PDStub
    keyspace: KeyspaceStub


class _Request(Protocol):
    @property
    def header(self) -> pdpb_pb2.RequestHeader: ...


class _Response(Protocol):
    @property
    def header(self) -> pdpb_pb2.ResponseHeader: ...


log = logging.getLogger(__name__)
OTHERS_SECONDS = 2.0
"""Seconds for which the first connection waits for given addresses that the cluster does not name: they may be of another one."""
_Answers: TypeAlias = "queue.SimpleQueue[tuple[str, grpc.Future[pdpb_pb2.GetMembersResponse]]]"
Request = TypeVar("Request", bound=_Request)
Response = TypeVar("Response", bound=_Response)
T = TypeVar("T")


class PdConnection:
    """Calls PD's leader; looks for it again when it moves or falls silent. Thread-safe."""

    def __init__(self, config: ClusterConfig) -> None:
        """Connect. An election is waited out: members that answer have ``config.retry_budget`` seconds to find a leader.

        Raises `ClusterUnreachable` or `ClusterTlsError` within ``config.connect_timeout`` seconds or so when no member
        answers, `RetryBudgetExhausted` when there is no leader for so long.
        """
        if config.tls.enabled:
            config.tls.ssl_context()  # reports unusable files before the first call
        self.config = config
        self._lock = threading.Lock()
        self._closed = False
        self._members: dict[str, _Member] = {}
        self._addresses = config.pd
        self.cluster_id = 0
        self._unresolved: set[str] = set()
        """Advertised addresses that were replaced."""
        self.outage = retry.Outage(f"PD {', '.join(config.pd)}", config.retry_budget)
        try:
            self._leader = config.retry.run(
                "connection to PD", lambda: run_in_worker_thread(self._find_leader), retry.PD_UNAVAILABLE, NoLeaderYet
            )
            self.outage.end()
        except BaseException:  # a signal too: gRPC waits forever for a channel that is collected with a call under way
            self.close()
            raise

    def close(self) -> None:
        """Close the channels; calls under way end with `ClusterUnreachable`."""
        run_in_worker_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            members, self._members = self._members, {}
        for member in members.values():
            member.channel.close()

    @property
    def leader(self) -> Leader:
        """Leader as of the last request for it."""
        return self._leader

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of all members that are known."""
        return self._addresses

    def unary(
        self,
        pick: Callable[[Leader], grpc.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        *,
        allow: Collection[int] = (),
        missing_of: Callable[[Response], str | None] = lambda _: None,
    ) -> Response:
        """Send one request to the leader, with our header; again, within the retry budget, when PD is unavailable.

        Raises as `check_header` for an error in the answer's header, except the types in `allow`. `missing_of` says
        what a good answer still misses, such as a region that PD is about to learn of; it is then asked for again.
        """

        def send(leader: Leader) -> Response:
            response = pick(leader)(request, timeout=self.request_seconds)
            self.outage.end()
            if response.header.error.type not in allow:
                check_header(response.header.error, f"PD {leader.address}")
            if missing := missing_of(response):
                raise ClusterUnreachable(f"PD {leader.address}: {missing}")
            return response

        request.header.cluster_id = self.cluster_id
        return self.call(send, f"PD {type(request).__name__.removesuffix('Request')}")

    @property
    def request_seconds(self) -> float:
        """Return the timeout of one request: shorter once PD has used up the budget, and during clean-up."""
        config = self.config
        longest = (
            min(config.connect_timeout, config.request_timeout) if self.outage.is_spent else config.request_timeout
        )
        return cancellation.request_seconds(longest)

    def call(self, send: Callable[[Leader], T], what: str) -> T:
        """Run `send` with the leader until it succeeds, PD refuses for good, or the retry budget is spent.

        The budget is PD's, not the call's: once PD has been silent for so long, each call tries once.
        """
        self.outage.check()
        with retry.Backoffer(what, self.config.retry, self.outage) as backoffer:
            while True:
                leader = self._leader
                try:
                    if self.outage.is_spent:  # the only try: not with a leader of before
                        leader = self._leader = run_in_worker_thread(self._find_leader)
                    with self.outage.asking():
                        answer = run_in_worker_thread(functools.partial(send, leader))
                except grpc.RpcError as error:
                    failure = self._failure(error, leader)
                except ClusterUnreachable as error:
                    failure = error
                except ValueError:  # gRPC raises it for a closed channel
                    if not self._closed:
                        raise
                    failure = ClusterUnreachable(f"PD {leader.address}: the connection was closed")
                else:
                    self.outage.end()
                    return answer
                if not failure.retryable or self._closed:
                    raise failure
                backoffer.wait(retry.PD_UNAVAILABLE, failure)
                self.refresh(leader, backoffer)

    def _failure(self, error: grpc.RpcError, leader: Leader) -> ClusterError:
        failure = to_cluster_error(error, f"PD {leader.address}", self.config.tls)
        if is_passing(failure.message):
            failure = ClusterUnreachable(failure.message)
        if failure.retryable:
            self.outage.fail()
        return failure

    def refresh(self, stale: Leader, backoffer: retry.Backoffer) -> None:
        """Look for the leader again, unless another thread has found one other than `stale`."""
        if self._leader is not stale:
            return
        try:
            self._leader = run_in_worker_thread(self._find_leader)
        except ClusterUnreachable as error:
            backoffer.wait(retry.PD_UNAVAILABLE, error)

    def _find_leader(self) -> Leader:
        """Ask all members at once who leads; the first that knows is believed."""
        answers: _Answers = queue.SimpleQueue()
        addresses = self._addresses
        for address in addresses:
            get_members = self._member(address).pd.GetMembers
            asked = get_members.future(
                pdpb_pb2.GetMembersRequest(), timeout=cancellation.request_seconds(self.config.connect_timeout)
            )
            asked.add_done_callback(functools.partial(lambda of, answer: answers.put((of, answer)), address))
        failures: dict[str, ClusterError] = {}
        is_there = False
        while len(failures) < len(addresses):
            address, answer = answers.get()
            try:
                members = answer.result()
            except grpc.RpcError as error:
                failures[address] = self._explain(address, error)
                is_there |= has_answered(error)
                if status_of(error)[0] is grpc.StatusCode.UNKNOWN:  # PD 5 reports so that it is starting
                    failures[address], is_there = ClusterUnreachable(failures[address].message), True
                continue
            except grpc.FutureCancelledError:
                failures[address] = ClusterUnreachable(f"PD {address}: the connection was closed")
                continue
            if members.leader.client_urls:
                self._check_one_cluster(address, members, answers, failures)
                return self._take(members, address)
            said = members.header.error.message or "no leader at the moment"
            failures[address] = ClusterUnreachable(f"PD {address}: {said}")
            is_there = True
        for failure in failures.values():
            if not failure.retryable:
                raise failure
        self.outage.fail()
        if is_there:
            raise NoLeaderYet("; ".join(failure.message for failure in failures.values()))
        raise no_answer({address: failure.message for address, failure in failures.items()})

    def _check_one_cluster(
        self, address: str, members: pdpb_pb2.GetMembersResponse, answers: _Answers, failed: Mapping[str, ClusterError]
    ) -> None:
        """Wait for the given addresses that this cluster does not name: one of another cluster is refused, one without answer is not."""
        if self.cluster_id:  # known: `_take` refuses another one
            return
        named = {bare_address(url) for member in members.members for url in member.client_urls}
        others = set(self.config.pd) - named - failed.keys() - {address}
        until = time.monotonic() + cancellation.request_seconds(min(self.config.connect_timeout, OTHERS_SECONDS))
        while others:
            try:
                other, answer = answers.get(timeout=max(until - time.monotonic(), 0.0))
                found = answer.result()
            except queue.Empty:
                return
            except (grpc.RpcError, grpc.FutureCancelledError):
                found = None
            others.discard(other)
            if found is not None and found.header.cluster_id != members.header.cluster_id:
                raise ClusterUnfit(
                    f"the addresses of PD are of two clusters: {address} of cluster {members.header.cluster_id}, {other} of cluster "
                    f"{found.header.cluster_id}",
                    hint="Pass addresses of one cluster.",
                )

    def _take(self, members: pdpb_pb2.GetMembersResponse, answered: str) -> Leader:
        """The leader, which ``answered`` names; a name that does not resolve here, as of a forwarded port, is replaced by that address."""
        cluster_id = members.header.cluster_id
        if self.cluster_id and cluster_id != self.cluster_id:
            raise ClusterUnfit(f"PD {', '.join(self._addresses)}: a different cluster ({cluster_id}) answers now")
        self.cluster_id = cluster_id
        known = (bare_address(url) for member in members.members for url in member.client_urls)
        self._addresses = tuple(dict.fromkeys((*self.config.pd, *known)))
        url = members.leader.client_urls[0]
        address = bare_address(url)
        if address != answered and not _resolves(address):
            if address not in self._unresolved:
                self._unresolved.add(address)
                log.warning(
                    "PD advertises %s, a name that does not resolve here: %s is used instead", address, answered
                )
            address = answered
        member = self._member(address)
        return Leader(address, url, member.pd, member.keyspace)

    def _explain(self, address: str, error: grpc.RpcError) -> ClusterError:
        failure = to_cluster_error(error, f"PD {address}", self.config.tls)
        code, details = status_of(error)
        if code is grpc.StatusCode.UNAVAILABLE:
            reason = explain_failure(*split_address(address), self.config.tls)
            if reason is not None:
                return ClusterTlsError(f"PD {address}: {reason}")
        if code is grpc.StatusCode.UNIMPLEMENTED or NO_HTTP2 in details:
            return NotPd(f"{address}: this is not PD, another server answers: {details}")
        return failure

    def _member(self, address: str) -> _Member:
        with self._lock:
            if self._closed:
                raise ClusterUnreachable(f"PD {address}: the connection was closed")
            if address not in self._members:
                channel = open_channel(address, self.config.tls)
                self._members[address] = _Member(channel, PDStub(channel), KeyspaceStub(channel))
            return self._members[address]


def _resolves(address: str) -> bool:
    """Return whether the host of an address has an IP address here."""
    try:
        socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True
