"""The API version of a cluster, read from the stores' configuration over HTTP and HTTPS."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br.cluster import topology
from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.topology import Store, StoreState, read_config
from tikv_br.errors import ClusterTlsError, ClusterUnfit, RequestRefused, RetryBudgetExhausted
from tikv_br.formats.api_version import ApiVersion

CONFIGS = {
    ApiVersion.V1: {"api-version": 1, "enable-ttl": False},
    ApiVersion.V1TTL: {"api-version": 1, "enable-ttl": True},
    ApiVersion.V2: {"api-version": 2, "enable-ttl": True},
}


def store(server: ScriptedHttp, store_id: int = 1) -> Store:
    """A store whose status port is the scripted server."""
    return Store(store_id, "127.0.0.1:1", server.address, StoreState.UP, "8.5.2")


def serve(server: ScriptedHttp, storage: object) -> None:
    """Let a server have this storage section."""
    server.scripts["/config"] = [(200, json.dumps({"storage": storage, "server": {}}).encode())]


@pytest.mark.parametrize("version", list(ApiVersion))
def test_each_version_is_recognised(version: ApiVersion) -> None:
    """api-version and enable-ttl together name the version."""
    with ScriptedHttp() as server:
        serve(server, CONFIGS[version])
        assert read_config([store(server)], TlsFiles(), 60.0).api_version is version


def test_a_store_before_api_versions_is_v1() -> None:
    """An absent or zero api-version means V1."""
    with ScriptedHttp() as server:
        serve(server, {})
        assert read_config([store(server)], TlsFiles(), 60.0).api_version is ApiVersion.V1
        serve(server, {"api-version": 0, "enable-ttl": True})
        assert read_config([store(server)], TlsFiles(), 60.0).api_version is ApiVersion.V1TTL


@pytest.mark.parametrize(
    ("settings", "age"),
    [
        ({"renew-interval": "100ms", "alloc-ahead-buffer": "3s"}, 3.0),
        ({"renew-interval": "100ms", "alloc-ahead-buffer": "1m30s"}, 90.0),
        ({"renew-interval": "1s", "alloc-ahead-buffer": "2500ms"}, 3.0),  # whole batches
        ({"renew-interval": "10ms", "alloc-ahead-buffer": "1h"}, 10.24),  # at most 1,024
        ({"renew-interval": "100ms", "available-interval": "5s"}, 5.0),  # 6.3
        ({"renew-interval": "100ms", "renew-batch-min-size": 100}, 0.1),  # 6.2
        ({"renew-interval": "100ms", "alloc-ahead-buffer": "0s"}, 0.0),
        ({"renew-interval": "often", "alloc-ahead-buffer": "3s"}, 3.0),
        (None, 3.0),
    ],
)
def test_the_age_of_timestamps_is_that_of_the_stores_settings(settings: object, age: float) -> None:
    """Batches of one renewal each, as many as cover the buffer; the default where a store names no settings."""
    with ScriptedHttp() as server:
        document = {"storage": CONFIGS[ApiVersion.V2]} | ({} if settings is None else {"causal-ts": settings})
        server.scripts["/config"] = [(200, json.dumps(document).encode())]
        assert read_config([store(server)], TlsFiles(), 60.0).timestamp_age == age


def test_the_oldest_timestamps_of_any_store_count() -> None:
    """Regions may move to it."""
    with ScriptedHttp() as one, ScriptedHttp() as two:
        for server, buffer in ((one, "9s"), (two, "1s")):
            settings = {"renew-interval": "100ms", "alloc-ahead-buffer": buffer}
            document = {"storage": CONFIGS[ApiVersion.V2], "causal-ts": settings}
            server.scripts["/config"] = [(200, json.dumps(document).encode())]
        assert read_config([store(one), store(two, 2)], TlsFiles(), 60.0).timestamp_age == 9.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (((4096, "8MiB"), (8192, "16MiB")), (4096, 8 << 20)),
        (((16384, "1.5MiB"), (16384, 1 << 30)), (16384, 3 << 19)),
        (((None, None), ("large", {})), (8192, 8 << 20)),
    ],
)
def test_the_smallest_limits_of_any_store_count(
    settings: tuple[tuple[object, object], ...], expected: tuple[int, int]
) -> None:
    """A row must fit where its region may move to; the defaults where a store names none."""
    with ScriptedHttp() as one, ScriptedHttp() as two:
        for server, (key, entry) in zip((one, two), settings, strict=True):
            storage = CONFIGS[ApiVersion.V2] | {"max-key-size": key}
            document = {"storage": storage, "raftstore": {"raft-entry-max-size": entry}}
            server.scripts["/config"] = [(200, json.dumps(document).encode())]
        config = read_config([store(one), store(two, 2)], TlsFiles(), 60.0)
    assert (config.max_key_size, config.max_entry_size) == expected


def test_stores_that_disagree_are_told_one_by_one() -> None:
    """A half-migrated cluster is not worked on."""
    with ScriptedHttp() as one, ScriptedHttp() as two:
        serve(one, CONFIGS[ApiVersion.V1])
        serve(two, CONFIGS[ApiVersion.V2])
        with pytest.raises(ClusterUnfit, match="store 1: v1, store 2: v2"):
            read_config([store(one), store(two, 2)], TlsFiles(), 60.0)


def test_no_store_is_unfit() -> None:
    """Without a store there is no version."""
    with pytest.raises(ClusterUnfit, match="no store"):
        read_config([], TlsFiles(), 60.0)


@pytest.mark.parametrize("body", [b"not json", b"[]", b"{}", b'{"storage": 1}'])
def test_other_answers_at_the_status_port_are_refused(body: bytes) -> None:
    """Another server at the status port must not be taken for V1."""
    with ScriptedHttp() as server:
        server.scripts["/config"] = [(200, body)]
        with pytest.raises(RequestRefused):
            read_config([store(server)], TlsFiles(), 60.0)


def test_a_version_to_come_is_unfit() -> None:
    """API V3 exists in the protocol; this tool does not know it."""
    with ScriptedHttp() as server:
        serve(server, {"api-version": 3})
        with pytest.raises(ClusterUnfit, match=r"api-version 3: API V3 \(namespaces\) is not supported"):
            read_config([store(server)], TlsFiles(), 60.0)


def test_stores_that_are_all_silent_are_asked_until_the_budget_is_spent() -> None:
    """The message names their addresses."""
    dead = [ScriptedHttp(), ScriptedHttp()]
    for server in dead:
        server.close()
    with pytest.raises(RetryBudgetExhausted, match=rf"tries: .*{dead[0].address}.*{dead[1].address}"):
        read_config([store(dead[0]), store(dead[1], 2)], TlsFiles(), 60.0, 0.5)


def test_a_dead_store_does_not_matter_while_another_one_answers() -> None:
    """PD may call it Up for 20 s yet: its own word is not needed."""
    dead = ScriptedHttp()
    dead.close()
    with ScriptedHttp() as server:
        serve(server, CONFIGS[ApiVersion.V2])
        assert read_config([store(dead, 1), store(server, 2)], TlsFiles(), 60.0).api_version is ApiVersion.V2


def test_a_store_that_hangs_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was stopped takes connections and never answers."""
    monkeypatch.setattr(topology, "LATE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung, ScriptedHttp() as server:
        serve(server, CONFIGS[ApiVersion.V1])
        silent = Store(2, "127.0.0.1:1", f"127.0.0.1:{hung.getsockname()[1]}", StoreState.UP, "8.5.2")
        began = time.monotonic()
        assert read_config([silent, store(server)], TlsFiles(), 300.0).api_version is ApiVersion.V1
        assert time.monotonic() - began < 100


def test_a_store_that_comes_back_is_waited_for() -> None:
    """While no store answers, all are asked again."""
    with ScriptedHttp() as server:
        good = (200, json.dumps({"storage": CONFIGS[ApiVersion.V2]}).encode())
        server.scripts["/config"] = [(503, b"starting"), good]
        assert read_config([store(server)], TlsFiles(), 60.0, 60.0).api_version is ApiVersion.V2


def test_https_with_another_authority_is_a_tls_error(tmp_path: Path) -> None:
    """A status port that our authority did not sign is not believed."""
    with ScriptedHttp(Authority(tmp_path, "theirs").issue("server")) as server:
        tls = TlsFiles(ca=str(Authority(tmp_path, "ours").ca))
        with pytest.raises(ClusterTlsError, match="not trusted"):
            read_config([store(server)], tls, 60.0)


def test_tls_to_a_plain_port_is_a_tls_error(tmp_path: Path) -> None:
    """No silent fall-back to plain HTTP."""
    with ScriptedHttp() as server:
        serve(server, CONFIGS[ApiVersion.V2])
        with pytest.raises(ClusterTlsError, match="handshake"):
            read_config([store(server)], TlsFiles(ca=str(Authority(tmp_path, "ours").ca)), 60.0)
