"""The client of etcd against a real one, with etcd's own HTTP gateway as the witness."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.certificates import Authority
from tests.support.etcd import real_etcd
from tests.support.scripted_grpc import ScriptedServer, fail
from tests.support.waiting import eventually
from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.etcd import Etcd, LeaseHolder
from tikv_br.cluster.etcd_values import Delete, Get, Put, absent, created_at, unchanged
from tikv_br.cluster.pb import etcdserverpb_pb2 as pb
from tikv_br.errors import ClusterTlsError, EtcdLeaseExpired, EtcdRefused, EtcdUnreachable, UsageError
from tikv_br.playground.etcd import EtcdServer
from tikv_br.playground.settings import TlsSettings

DEAD = "127.0.0.1:1"
"""Nothing listens there."""
TXN = "/etcdserverpb.KV/Txn"
RANGE = "/etcdserverpb.KV/Range"


def gateway(server: EtcdServer, path: str, **body: object) -> dict[str, Any]:
    """Ask etcd by JSON over HTTP."""
    request = urllib.request.Request(f"http://{server.address}/v3/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def base64_of(text: str) -> str:
    """As the gateway wants keys and values."""
    return base64.b64encode(text.encode()).decode()


def test_keys_as_the_gateway_sees_them(server: EtcdServer, etcd: Etcd, prefix: str) -> None:
    """Other clients see puts with their revisions; a listing is of one prefix, and deletes return their number."""
    revision = etcd.put(f"{prefix}a", b"1")
    etcd.put(f"{prefix}a", b"\xff\x00")
    etcd.put(f"{prefix}b/c", b"3")
    etcd.put(f"{prefix[:-1]}0", b"behind the prefix")
    found = etcd.get(f"{prefix}a")
    [seen] = gateway(server, "kv/range", key=base64_of(f"{prefix}a"))["kvs"]
    assert found is not None
    assert (found.value, found.create_revision, found.lease) == (b"\xff\x00", revision, 0)
    assert base64.b64decode(seen["value"]) == found.value
    assert (int(seen["create_revision"]), int(seen["mod_revision"])) == (found.create_revision, found.mod_revision)
    listing = etcd.range(prefix)
    assert [item.key for item in listing.items] == [f"{prefix}a", f"{prefix}b/c"]
    assert listing.revision >= found.mod_revision
    assert etcd.delete(prefix, prefix=True) == 2
    assert etcd.delete(prefix, prefix=True) == 0
    assert etcd.get(f"{prefix}a") is None
    assert etcd.delete(f"{prefix[:-1]}0") == 1


def test_a_transaction_does_one_branch_whole(etcd: Etcd, prefix: str) -> None:
    """All conditions decide together; reads of the branch return; a key created again is another one."""
    key, other = f"{prefix}key", f"{prefix}other"
    made = etcd.transact([absent(key), absent(other)], [Put(key, b"1"), Put(other, b"2")])
    assert made.succeeded
    first = etcd.get(key)
    assert first is not None
    assert first.create_revision == made.revision
    again = etcd.transact([absent(key)], [Put(key, b"never")], [Get(key), Get(prefix, prefix=True)])
    assert not again.succeeded
    assert [[item.value for item in listing.items] for listing in again.listings] == [[b"1"], [b"1", b"2"]]
    assert etcd.transact([unchanged(first)], [Put(key, b"3")]).succeeded
    assert not etcd.transact([unchanged(first)], [Put(key, b"4")]).succeeded
    assert etcd.transact([created_at(key, made.revision)], [Delete(other)]).succeeded
    etcd.delete(key)
    etcd.put(key, b"5")
    assert not etcd.transact([created_at(key, made.revision)], [Put(key, b"6")]).succeeded
    assert [(item.key, item.value) for item in etcd.range(prefix).items] == [(key, b"5")]


def put_for_moments(etcd: Etcd, key: str) -> int:
    """Put a key with a lease that is soon over; on a busy machine it may be over before that."""
    while True:
        lease = etcd.grant(2)
        with contextlib.suppress(EtcdLeaseExpired):
            etcd.put(key, b"", lease)
            return lease


def test_keys_go_with_their_lease(server: EtcdServer, etcd: Etcd, prefix: str) -> None:
    """A held lease is renewed; a revoked one takes its keys at once; an abandoned one at its expiry."""
    with LeaseHolder(etcd, 15) as held:
        first = held.deadline
        etcd.put(f"{prefix}held", b"", held.lease)
        forgotten = put_for_moments(etcd, f"{prefix}forgotten")
        eventually(lambda: etcd.get(f"{prefix}forgotten") is None, 60)
        eventually(lambda: held.deadline > first, 60)
        held.check()
        found = etcd.get(f"{prefix}held")
        assert found is not None
        assert found.lease == held.lease
        seen = gateway(server, "lease/timetolive", ID=str(held.lease))
        assert int(seen["grantedTTL"]) == 15
        with pytest.raises(EtcdLeaseExpired):
            etcd.keep_alive(forgotten)
        with pytest.raises(EtcdLeaseExpired):
            etcd.put(f"{prefix}late", b"", forgotten)
        with pytest.raises(EtcdLeaseExpired):
            etcd.transact([], [Put(f"{prefix}late", b"", forgotten)])
        etcd.revoke(forgotten)
    assert etcd.range(prefix).items == ()
    assert held.remaining <= 0


def test_another_member_takes_over(server: EtcdServer, prefix: str) -> None:
    """If one address is dead the other is asked, and asked first from then on; with none left it ends in time."""
    with Etcd.connect([DEAD, server.address]) as etcd:
        etcd.put(f"{prefix}key", b"1")
        assert etcd.delete(prefix, prefix=True) == 1
    with Etcd([DEAD], retry_budget=0.5) as lonely, pytest.raises(EtcdUnreachable, match="gave up"):
        lonely.get("key")
    with pytest.raises(UsageError):
        Etcd([])


def test_a_member_that_is_silent_is_passed_over(server: EtcdServer, prefix: str) -> None:
    """One that accepts connections and never answers costs one request's time-out, for a lease's renewal too."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Etcd([address, server.address], request_timeout=1.0) as etcd:
            etcd.put(f"{prefix}key", b"1")
        with (
            Etcd([address, server.address]) as etcd,
            Etcd([server.address]) as direct,
            LeaseHolder(direct, 60) as held,
        ):
            with pytest.raises(EtcdUnreachable):
                etcd.keep_alive(held.lease, 0.5)
            assert etcd.keep_alive(held.lease, 30.0) == 60


def test_an_etcd_that_goes_and_comes_back(tmp_path: Path) -> None:
    """Calls wait for one that restarts; while it stands still nothing is ours for longer than the lease."""
    with real_etcd(tmp_path) as server, Etcd.connect([server.address]) as etcd:
        etcd.put("key", b"kept")
        server.kill()
        with Etcd([server.address], retry_budget=0.2) as impatient, pytest.raises(EtcdUnreachable):
            impatient.get("key")
        server.start()
        found = etcd.get("key")
        assert found is not None
        assert found.value == b"kept"
        with LeaseHolder(etcd, 2) as held:
            server.process.send_signal(signal.SIGSTOP)
            try:
                eventually(lambda: held.remaining <= 0, 30)
                with pytest.raises(EtcdLeaseExpired):
                    held.check()
            finally:
                server.process.send_signal(signal.SIGCONT)


def test_a_lost_answer_is_told() -> None:
    """A transaction that may have taken effect is not sent again, unless twice is as good as once."""
    answer = pb.TxnResponse(header=pb.ResponseHeader(revision=7), succeeded=True)
    with ScriptedServer() as server, Etcd([server.address]) as etcd:
        server.script(TXN, fail("UNAVAILABLE", "etcdserver: request timed out"), answer)
        with pytest.raises(EtcdUnreachable) as reported:
            etcd.transact([absent("key")], [Put("key", b"")])
        assert reported.value.outcome_unknown
        assert len(server.requests[TXN]) == 1
        server.script(TXN, fail("UNAVAILABLE", "etcdserver: leader changed"), answer)
        assert etcd.transact([absent("key")], [Put("key", b"")], repeatable=True).revision == 7
        assert len(server.requests[TXN]) == 3


def test_an_etcd_with_too_much_to_do_is_asked_again() -> None:
    """It refuses before it looks at a transaction, so that sending it again is safe; a full database is another matter."""
    answer = pb.TxnResponse(header=pb.ResponseHeader(revision=7), succeeded=True)
    with ScriptedServer() as server, Etcd([server.address]) as etcd:
        server.script(TXN, fail("RESOURCE_EXHAUSTED", "etcdserver: too many requests"), answer)
        assert etcd.transact([absent("key")], [Put("key", b"")]).revision == 7
        server.script(TXN, fail("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded"), answer)
        with pytest.raises(EtcdRefused, match="space exceeded"):
            etcd.transact([absent("key")], [Put("key", b"")])


def test_a_token_from_before_users_changed_is_renewed() -> None:
    """Any change of users makes tokens old (JWT): etcd wants another login, and gets it."""
    with ScriptedServer() as server:
        server.script("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse(token="fresh"))
        server.script(RANGE, pb.RangeResponse(header=pb.ResponseHeader(revision=1)))
        with Etcd([server.address], user="root", password="right") as etcd:
            etcd.get("key")
            old = fail("INVALID_ARGUMENT", "etcdserver: revision of auth store is old")
            server.script(RANGE, old, pb.RangeResponse(header=pb.ResponseHeader(revision=2)))
            assert etcd.get("key") is None
        assert len(server.requests["/etcdserverpb.Auth/Authenticate"]) == 2


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_failure_has_a_class(code: grpc.StatusCode) -> None:
    """No status of gRPC comes through bare."""
    with ScriptedServer() as server, Etcd([server.address], retry_budget=0.0) as etcd:
        server.script(RANGE, fail(code.name, "for no reason"))
        with pytest.raises((EtcdRefused, EtcdUnreachable), match=r"reason|protocol"):
            etcd.get("key")


def test_passwords(tmp_path: Path) -> None:
    """It works with a user and a password, also after etcd has lost the token; else the error has the reason."""
    with real_etcd(tmp_path) as server:
        gateway(server, "auth/user/add", name="root", password="right")
        gateway(server, "auth/user/grant", user="root", role="root")
        gateway(server, "auth/enable")
        with pytest.raises(EtcdRefused, match="user name is empty"):
            Etcd.connect([server.address])
        with pytest.raises(EtcdRefused, match="authentication failed") as wrong:
            Etcd.connect([server.address], user="root", password="wrong-one")
        assert "wrong-one" not in str(wrong.value)
        with Etcd.connect([server.address], user="root", password="right") as etcd:
            etcd.put("key", b"1")
            server.kill()  # tokens are kept in memory
            server.start()
            found = etcd.get("key")
            assert found is not None
            with LeaseHolder(etcd, 60) as held:
                assert etcd.keep_alive(held.lease) == 60


def test_tls(tmp_path: Path) -> None:
    """Mutual TLS works with the right files; without them the message names the missing flag, at once."""
    authority = Authority(tmp_path, "authority")
    pair = authority.issue("server")
    files = TlsSettings(str(authority.ca), str(pair.cert), str(pair.key), mutual=True)
    with real_etcd(tmp_path / "etcd", files) as server:
        right = TlsFiles(str(authority.ca), str(pair.cert), str(pair.key))
        with Etcd.connect([server.address], right) as etcd:
            etcd.put("key", b"1")
        began = time.monotonic()
        with pytest.raises(ClusterTlsError, match="uses TLS"):
            Etcd.connect([server.address])
        with pytest.raises(ClusterTlsError, match="requires a client certificate"):
            Etcd.connect([server.address], TlsFiles(str(authority.ca)))
        with pytest.raises(ClusterTlsError, match="not trusted"):
            Etcd.connect([server.address], TlsFiles(str(Authority(tmp_path, "other").ca)))
        assert time.monotonic() - began < 30


def test_members_of_two_clusters_are_refused() -> None:
    """Whichever is asked first; the message names both. A member that does not answer is tolerated."""
    with ScriptedServer() as one, ScriptedServer() as other:
        for server, cluster_id in ((one, 0xA), (other, 0xB)):
            answer = pb.RangeResponse(header=pb.ResponseHeader(cluster_id=cluster_id))
            server.script("/etcdserverpb.KV/Range", answer)
        with pytest.raises(EtcdRefused, match="of 2 clusters") as refused:
            Etcd.connect([one.address, other.address])
        assert f"{one.address} of a, {other.address} of b" in refused.value.message
        Etcd.connect([one.address, "127.0.0.1:1"]).close()
