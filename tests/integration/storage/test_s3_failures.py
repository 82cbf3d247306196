"""Errors of S3 URLs, rights and networks: each has its class and its sentence, on a real server."""

from __future__ import annotations

import dataclasses
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.s3_servers import S3Server, versitygw_server
from tests.integration.storage.scripted import S3_URL, listing, page, scripted
from tests.integration.storage_suite import stream
from tests.support.ports import reserved_ports
from tikv_br.cancellation import clean_up
from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageUnreachable,
    UsageError,
)
from tikv_br.storage import cloud, outage
from tikv_br.storage.base import ObjectStore, Writer
from tikv_br.storage.cloud import PART_SIZE
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

# ---------------------------------------------------------------------------------------- wrong input, each with its class


def _calls(store: ObjectStore) -> dict[str, Callable[[], object]]:
    """Every kind of request, to be tried in turn."""
    return {
        "get": lambda: store.get("object"),
        "get_range": lambda: store.get_range("object", 0, 1),
        "stat": lambda: store.stat("object"),
        "list": lambda: list(store.list()),
        "put": lambda: store.put("object", b"x"),
        "put_if_absent": lambda: store.put_if_absent("object", b"x"),
        "delete": lambda: store.delete("object"),
        "small writer": lambda: stream(store, "object", 1, 10),
        "large writer": lambda: stream(store, "object", 2, PART_SIZE),
    }


NOT_THE_BUDGET = outage.PATIENCE_SECONDS * 2 / 3
"""Seconds within which even a busy machine fails for a closed port: a known server is waited for much longer."""
CALLS = ("get", "get_range", "stat", "list", "put", "put_if_absent", "delete", "small writer", "large writer")


def _fails(location: StorageLocation, call: str) -> StorageError:
    with pytest.raises(StorageError) as caught:
        _calls(open_store(location))[call]()
    return caught.value


@pytest.mark.parametrize("call", [call for call in CALLS if call != "delete"])
def test_missing_bucket(versitygw: S3Server, call: str) -> None:
    """A bucket that does not exist is said by name, by every request that needs it."""
    error = _fails(versitygw.location("p", bucket="no-such-bucket"), call)
    assert type(error) is StorageObjectMissing
    assert "bucket 'no-such-bucket' does not exist" in error.message


def test_missing_bucket_on_deletion(versitygw: S3Server) -> None:
    """Deletion too: it is not idempotence to miss the whole bucket."""
    error = _fails(versitygw.location("p", bucket="no-such-bucket"), "delete")
    assert "bucket 'no-such-bucket' does not exist" in error.message


@pytest.mark.parametrize("call", CALLS)
def test_wrong_secret(versitygw: S3Server, call: str) -> None:
    """A secret that does not fit the key is StorageDenied, and no message or hint repeats it."""
    error = _fails(versitygw.location("p", secret_access_key="wrong-but-secret"), call)
    assert type(error) is StorageDenied
    assert "wrong-but-secret" not in str(error.to_json())
    assert "secret access key does not match" in error.message


@pytest.mark.parametrize("call", CALLS)
def test_unknown_access_key(versitygw: S3Server, call: str) -> None:
    """An access key that the server does not know is StorageDenied, though some servers answer 404."""
    error = _fails(versitygw.location("p", access_key="nobody"), call)
    assert type(error) is StorageDenied
    assert "access key is unknown" in error.message


@pytest.mark.parametrize("call", CALLS)
def test_wrong_region(versitygw: S3Server, call: str) -> None:
    """A region that is not the bucket's is said together with the right one."""
    error = _fails(versitygw.location("p", region="eu-west-1"), call)
    assert type(error) is StorageDenied
    assert "in region 'us-east-1', not 'eu-west-1'" in error.message
    assert error.hint == "Set --s3.region us-east-1."


def test_read_only_rights(tmp_path: Path) -> None:
    """Credentials that may not write are StorageDenied on writing; reading works."""
    with versitygw_server(tmp_path) as server:
        open_store(server.location("p")).put("object", b"x")
    with versitygw_server(tmp_path, options=("--readonly",)) as server:
        store = open_store(server.location("p"))
        assert store.get("object") == b"x"
        for call in ("put", "put_if_absent", "delete", "small writer", "large writer"):
            assert type(_fails(server.location("p"), call)) is StorageDenied


def test_object_in_the_way_of_a_folder(versitygw: S3Server) -> None:
    """A server over a file system cannot have an object below an object: an error in its own text."""
    store = open_store(versitygw.location("in-the-way"))
    store.put("name", b"x")
    with pytest.raises(StorageError, match="ObjectParentIsFile"):
        store.put("name/below", b"x")


@pytest.mark.parametrize("call", ["get", "list", "put", "put_if_absent", "large writer"])
def test_a_refused_connection_is_unreachable(call: str) -> None:
    """A refused connection is StorageUnreachable within seconds, and names endpoint and cause."""
    with reserved_ports(1) as [port]:
        endpoint = f"http://127.0.0.1:{port}"
        started = time.monotonic()
        error = _fails(parse(f"s3://bkt/p?endpoint={endpoint}&region=r&access-key=a&secret-access-key=s"), call)
    assert time.monotonic() - started < NOT_THE_BUDGET
    assert type(error) is StorageUnreachable
    assert error.message == f"{endpoint} does not answer: connection refused"


def test_unknown_host() -> None:
    """A host name that does not resolve is said as that."""
    error = _fails(
        parse("s3://bkt/p?endpoint=http://no-such-host.invalid&region=r&access-key=a&secret-access-key=s"), "get"
    )
    assert type(error) is StorageUnreachable
    assert "the host name does not resolve" in error.message


def test_server_that_never_answers() -> None:
    """A server that accepts and stays silent does not hold us longer than some seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        error = _fails(parse(f"s3://bkt/p?endpoint={endpoint}&region=r&access-key=a&secret-access-key=s"), "get")
    assert time.monotonic() - started < NOT_THE_BUDGET
    assert type(error) is StorageUnreachable
    assert "no answer in time" in error.message


def test_https_to_a_plain_endpoint(versitygw: S3Server) -> None:
    """https:// where the server speaks http is said as that."""
    error = _fails(versitygw.location("p", endpoint=versitygw.endpoint.replace("http:", "https:")), "get")
    assert type(error) is StorageUnreachable
    assert "does it need http://?" in error.message


# ------------------------------------------------------------------------------------------------------------- outages


def test_outage_is_ridden_out(tmp_path: Path) -> None:
    """Once the server has answered, a restart of it in the middle of the work fails nothing."""
    with reserved_ports(1) as [port]:
        with versitygw_server(tmp_path, port=port) as server:
            store = open_store(server.location("p"))
            store.put("before", b"x")
            server.kill()
            results: list[object] = []
            reader = threading.Thread(target=lambda: results.append(store.get("before")))
            reader.start()
            time.sleep(1)
            assert reader.is_alive(), "the request waits"
        with versitygw_server(tmp_path, port=port):
            reader.join(timeout=120)
            assert results == [b"x"]


def patient(location: StorageLocation, seconds: float) -> StorageLocation:
    """The location, with outages of so many seconds ridden out."""
    return dataclasses.replace(location, s3=structs.replace(location.s3, patience=seconds))


@pytest.mark.parametrize("call", [call for call in CALLS if call != "large writer"])
def test_a_server_that_is_away_for_some_seconds_fails_no_request(call: str, tmp_path: Path) -> None:
    """Refused connections are ridden out by every request, also of a store that a task has just opened."""
    with reserved_ports(1) as [port]:
        with versitygw_server(tmp_path, port=port) as server:
            location = server.location("p")
            open_store(location).put("object", b"x")
            task = pickle.dumps(open_store(location))
            server.kill()
        if call == "put_if_absent":
            (tmp_path / "backups" / "p" / "object").unlink()
        outage._health.clear()  # as in the process of the task
        done: list[object] = []
        requests = threading.Thread(target=lambda: done.append(_calls(pickle.loads(task))[call]() or "done"))
        requests.start()
        time.sleep(6)
        assert requests.is_alive(), "the request waits"
        with versitygw_server(tmp_path, port=port):
            requests.join(timeout=120)
            assert done


def test_all_requests_share_one_outage(tmp_path: Path) -> None:
    """Many threads fail together, and later requests do not wait again."""
    with versitygw_server(tmp_path) as server:
        store = open_store(patient(server.location("p"), 10))
        store.put("object", b"x")
        server.kill()
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            failures = [pool.submit(_fails, store.location, "get") for _number in range(16)]
        assert all("gave up after" in future.result().message for future in failures)
        assert all("connection refused" in future.result().message for future in failures)
        assert (
            9.9 < time.monotonic() - began < 20
        )  # all of the patience; two outages, one after the other, would take 20
        again = time.monotonic()
        assert not _fails(store.location, "put").retryable
        assert time.monotonic() - again < 10


@pytest.mark.parametrize("call", ["get", "put", "small writer", "large writer"])
def test_a_frozen_server_is_given_up_within_the_patience(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes connections and says nothing more: storage is what failed, and clean-up does not wait again."""
    monkeypatch.setattr(cloud, "QUIET_SECONDS", 1.0)
    with versitygw_server(tmp_path) as server:
        store = open_store(patient(server.location("p"), 5))
        store.put("object", b"x")
        server.freeze()
        began = time.monotonic()
        with pytest.raises(StorageUnreachable, match="no answer in time; gave up after"):
            _calls(store)[call]()
        assert time.monotonic() - began < 20
        again = time.monotonic()
        for _step in range(5):
            with pytest.raises(StorageUnreachable, match="no answer in time"):
                store.delete("object")
        assert time.monotonic() - again < 20  # five outages would take 25


def test_a_listing_goes_on_behind_what_it_has_told(tmp_path: Path) -> None:
    """An outage between two pages neither loses an object nor repeats one."""
    names = [f"{number:04d}" for number in range(1200)]
    with reserved_ports(1) as [port]:
        with versitygw_server(tmp_path, port=port) as server:
            store = open_store(server.location("p"))
            (tmp_path / "backups" / "p").mkdir()
            for name in names:
                (tmp_path / "backups" / "p" / name).write_bytes(b"x")
            listing = iter(store.list())
            found = [next(listing).name]
            server.kill()
        restart = threading.Timer(2, lambda: None)
        restart.start()
        with versitygw_server(tmp_path, port=port):
            found += [info.name for info in listing]
    assert found == names


def test_clean_up_waits_for_seconds_only(tmp_path: Path) -> None:
    """Removals of a failed run do not wait for the whole patience."""
    with versitygw_server(tmp_path) as server:
        store = open_store(server.location("p"))
        store.put("object", b"x")
        server.kill()
        began = time.monotonic()
        with clean_up(), pytest.raises(StorageUnreachable):
            store.delete("object")
        assert time.monotonic() - began < NOT_THE_BUDGET


NAMES = ("Forbidden/NoSuchBucket", "status code: 503", "<Code>NoSuchBucket<", "Expired Timeout", "HTTP error")


@pytest.mark.parametrize("name", NAMES)
def test_names_do_not_decide_what_an_error_means(versitygw: S3Server, name: str) -> None:
    """An object that is missing is missing, whatever it is called; a refused connection is one."""
    with pytest.raises(StorageObjectMissing, match="does not exist") as caught:
        open_store(versitygw.location("Forbidden")).get(name)
    assert "bucket" not in caught.value.message.partition("://")[0]
    with reserved_ports(1) as [port]:
        url = f"s3://Expired.InvalidCertificate/Timeout?endpoint=http://127.0.0.1:{port}"
        store = open_store(parse(f"{url}&region=r&access-key=a&secret-access-key=s"))
        with pytest.raises(StorageUnreachable, match=r"does not answer: connection refused$"):
            store.get(name)


def test_server_lost_for_good_during_an_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload whose server dies ends with StorageUnreachable from write or close, not with a hang."""
    monkeypatch.setattr(cloud, "QUIET_SECONDS", 1.0)
    with versitygw_server(tmp_path) as server:
        store = open_store(patient(server.location("p"), 4))
        with store.open_writer("object") as writer:
            writer.write(bytes(3 * PART_SIZE))
            server.kill()
            with pytest.raises(StorageUnreachable, match="does not answer"):
                _write_on(writer)


def _write_on(writer: Writer) -> None:
    for _part in range(8):
        writer.write(bytes(PART_SIZE))
    writer.close()


def test_overload_is_retried() -> None:
    """503 SlowDown is answered with patience."""
    with scripted((200, ""), (503, "SlowDown"), (503, "SlowDown"), (200, "")) as location:
        assert open_store(location).get("object") == b"payload"


def test_a_conditional_write_that_met_another_one_is_tried_again() -> None:
    """409 does not mean that the name is taken: the next answer decides."""
    with scripted(
        (404, ""), (409, "ConditionalRequestConflict"), (409, "ConditionalRequestConflict"), (200, "")
    ) as location:
        assert open_store(location).put_if_absent("object", b"x").size == 1
    taken = ((404, ""), (409, "ConditionalRequestConflict"), (412, "PreconditionFailed"))
    with scripted(*taken) as location, pytest.raises(StorageConflict, match="already exists"):
        open_store(location).put_if_absent("object", b"x")


@pytest.mark.parametrize(
    ("status", "code", "kind", "sentence"),
    [
        (503, "SlowDown", StorageUnreachable, "the endpoint keeps failing|503 SlowDown"),
        (500, "InternalError", StorageUnreachable, "500 InternalError"),
        (507, "InsufficientStorage", StorageFull, "507"),
        (403, "QuotaExceeded", StorageFull, "QuotaExceeded"),
        (400, "XMinioStorageFull", StorageFull, "XMinioStorageFull"),
        (403, "AccessDenied", StorageDenied, "the credentials lack the permission"),
        (403, "RequestTimeTooSkewed", StorageDenied, "clock differs"),
        (400, "ExpiredToken", StorageDenied, "the session token has expired"),
        (403, "InvalidObjectState", StorageDenied, "archive"),
        (301, "PermanentRedirect", StorageDenied, "not in region 'r'"),
        (412, "PreconditionFailed", StorageConflict, "already exists"),
        (409, "ConditionalRequestConflict", StorageUnreachable, "409 ConditionalRequestConflict"),
        (501, "NotImplemented", StorageError, "501 NotImplemented"),
        (400, "InvalidArgument", StorageError, "400 InvalidArgument, said the script"),
    ],
)
def test_answers_and_their_classes(status: int, code: str, kind: type[StorageError], sentence: str) -> None:
    """Each answer that servers give to a conditional put has its class and a sentence with the server's own words."""
    with scripted((404, ""), (status, code)) as location, pytest.raises(StorageError, match=sentence) as caught:
        open_store(patient(location, 1)).put_if_absent("object", b"x")
    assert isinstance(caught.value, kind)
    assert caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize(("status", "tries"), [(500, 2), (503, 2), (502, 1), (504, 1)])
def test_a_conditional_write_is_repeated_only_where_it_was_not_done(status: int, tries: int) -> None:
    """After a lost answer of a gateway another try could meet its own object."""
    with scripted((404, ""), (status, "InternalError"), (404, ""), (412, "PreconditionFailed")) as location:
        store = open_store(patient(location, 5))
        with pytest.raises(StorageConflict if tries > 1 else StorageUnreachable):
            store.put_if_absent("object", b"x")


def test_a_bucket_that_the_server_refuses_as_a_name(versitygw: S3Server) -> None:
    """It is the URL that is wrong."""
    with pytest.raises(UsageError, match="bucket name 'a_B'"):
        open_store(versitygw.location("p", bucket="a_B")).get("object")


@pytest.mark.parametrize("kind", ["plain", "one page", "no tokens", "silent", "one page, silent"])
def test_listings_are_whole(kind: str) -> None:
    """27 of 27 objects, also of a server that ends its listing after a page, whether it says so or not."""
    with listing(kind) as location:
        store = open_store(location)
        expected = [f"{number:02}" for number in range(27)]
        assert [info.name.removeprefix("f/") for info in store.list("f")] == expected
        assert [info.name for info in store.list()] == expected


@pytest.mark.parametrize("kind", ["no tokens, ignores start-after", "silent, ignores start-after"])
def test_listings_that_cannot_be_whole(kind: str) -> None:
    """Where the server cannot be asked for the rest, the listing is an error that names it; `check` finds it, too."""
    with listing(kind) as location:
        store = open_store(location)
        with pytest.raises(
            StorageError, match=r"http://127\.0\.0\.1:\d+ does not list the bucket 'bucket' as S3 does"
        ) as caught:
            list(store.list("f"))
        assert type(caught.value) is StorageError


AZURE_URL = "azure://container/p?account-name=acct&account-key=a2V5"


@pytest.mark.parametrize("url", [S3_URL, AZURE_URL])
@pytest.mark.parametrize("status", [200, 301, 302, 307, 403, 404])
def test_web_server_in_the_place_of_a_storage(status: int, url: str) -> None:
    """A page of HTML or a redirect is never taken for an empty bucket: one sentence says what answered, for every request."""
    with page(status, url) as location:
        for call in CALLS:
            error = _fails(location, call)
            assert not isinstance(error, StorageObjectMissing), call
            assert location.options.server in error.message, call
            said = "redirects" if status // 100 == 3 else "a page of HTML|does not answer as object storage does"
            assert re.search(said, error.message), call
            assert "\n" not in error.message


def test_overloaded_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway's page with 502 is an outage; the message says that a page came, and from where."""
    with page(502) as location, pytest.raises(StorageUnreachable, match="HTTP 502, a page of HTML from http://127"):
        open_store(location).get("object")


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("variable", ["{scheme}_proxy", "{SCHEME}_PROXY", "ALL_PROXY"])
def test_dead_proxy(scheme: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that does not answer is named beside the endpoint, without its password."""
    with reserved_ports(1) as [port]:
        monkeypatch.setenv(variable.format(scheme=scheme, SCHEME=scheme.upper()), f"http://me:hush@127.0.0.1:{port}")
        error = _fails(parse(f"{S3_URL}&endpoint={scheme}://storage.test:9000"), "get")
    said = (
        f"{scheme}://storage.test:9000 (through the proxy http://127.0.0.1:{port}) does not answer: connection refused"
    )
    assert error.message == said
    assert "hush" not in str(error.to_json())


def test_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that answers in the place of a server is named, for plain requests and for tunnels."""
    with page(403) as proxy:
        monkeypatch.setenv("http_proxy", proxy.s3.endpoint)
        monkeypatch.setenv("https_proxy", proxy.s3.endpoint)
        plain = _fails(parse(f"{S3_URL}&endpoint=http://storage.test:9000"), "get")
        tunnel = _fails(parse(f"{S3_URL}&endpoint=https://storage.test:9000"), "get")
    assert f"a page of HTML from http://storage.test:9000 (through the proxy {proxy.s3.endpoint})" in plain.message
    assert (
        f"https://storage.test:9000 (through the proxy {proxy.s3.endpoint}) does not answer: the proxy"
        in tunnel.message
    )


@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
@pytest.mark.parametrize("hosts", ["*", "example.com, *", "127.0.0.1", "127.0.0.0/8"])
def test_no_proxy(hosts: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_PROXY, also as ``*``, keeps requests to an address from the proxy."""
    with reserved_ports(1) as [port], scripted((200, "")) as location:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv(variable, hosts)
        assert open_store(location).get("object") == b"payload"


@pytest.mark.parametrize("answer", [(400, "RequestTimeout"), (408, "")])
@pytest.mark.parametrize("call", ["get", "stat", "put", "put_if_absent", "delete", "small writer"])
def test_idle_connections_are_tried_again(call: str, answer: tuple[int, str]) -> None:
    """What Amazon answers on a connection that was idle for too long passes: every request is sent again."""
    if call == "put_if_absent" and answer[0] == 408:  # it may have arrived
        pytest.skip("see test_conditional_writes_whose_answer_is_lost")
    with scripted((404, "NoSuchKey"), answer, (200, "")) as location:
        _calls(open_store(location))[call]()


def test_server_without_conditional_writes() -> None:
    """501 to If-None-Match, as of Alibaba's OSS, says what is missing and which storages have it."""
    with scripted((404, "NoSuchKey"), (501, "NotImplemented"), url=f"{S3_URL}&provider=ceph") as location:
        error = _fails(location, "put_if_absent")
    assert "does not support conditional writes (If-None-Match: HTTP 501 NotImplemented" in error.message
    assert "Amazon S3" in error.hint
