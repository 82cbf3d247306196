"""The policies of docs/storage.md against a real S3 server: they suffice, and no right in them is one too many."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import tikv_br
from tests.integration.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, find_versitygw, versitygw_server
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion

PAGE = Path(__file__).resolve().parents[2] / "docs" / "storage.md"
ROWS = {b"k%03d" % at: b"value" for at in range(200)}
USER, PASSWORD = "operator", "operators-secret"
KEEPER, READER = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL))

PRUNE = ["prune", "--keep-last", "1", "--confirm"]

Policy = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that knows a user who may nothing."""
    folder = tmp_path_factory.mktemp("gateway")
    with versitygw_server(folder / "objects", options=["--iam-dir", str(_made(folder / "users"))]) as server:
        admin = ["admin", "--access", ACCESS_KEY, "--secret", SECRET_KEY, "--endpoint-url", server.endpoint]
        user = ["create-user", "--access", USER, "--secret", PASSWORD, "--role", "user"]
        subprocess.run([find_versitygw(), *admin, *user], check=True, capture_output=True, timeout=60)
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Cluster to back up."""
    with live_cluster(tmp_path_factory.mktemp("cluster"), ApiVersion.V2, stores=1) as live:
        live.raw().batch_put(ROWS)
        yield live


class Operator:
    """The user, with the rights of a policy."""

    def __init__(self, server: S3Server, cluster: LiveCluster) -> None:
        self._server, self._cluster = server, cluster

    def may(self, policy: Policy) -> None:
        """Give these rights and no others."""
        statements = [
            {**statement, "Principal": {"AWS": [USER]}, "Resource": statement["Resource"].replace("backups", BUCKET, 1)}
            for statement in policy["Statement"]
        ]
        self._server.admin.put_bucket_policy(
            Bucket=BUCKET, Policy=json.dumps({"Version": policy["Version"], "Statement": statements})
        )

    def run(self, *command: str, name: str = "/first") -> int:
        """The exit code of a command on a backup, or on the folder of all, where the policies give rights."""
        url = self._server.url(f"cluster-1{name}", access_key=USER, secret_access_key=PASSWORD)
        done = tikv_br(*command, "-s", url, "--output", "json")
        assert PASSWORD not in done.out + done.err
        return done.code

    def back_up(self, name: str) -> int:
        """The exit code of a backup."""
        return self.run("backup", "raw", "-u", self._cluster.pd, name=f"/{name}")

    def restore(self) -> int:
        """Exit code of a restore over existing rows."""
        return self.run("restore", "raw", "-u", self._cluster.pd, "--allow-overwrite", "--restamp")


@pytest.fixture(scope="module")
def operator(server: S3Server, cluster: LiveCluster) -> Operator:
    """See `Operator`; a backup is there."""
    operator = Operator(server, cluster)
    operator.may(KEEPER)
    assert operator.back_up("first") == 0
    return operator


def without(policy: Policy, action: str) -> Policy:
    """A policy less one right."""
    kept = []
    for statement in policy["Statement"]:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        left = [each for each in actions if each != action]
        kept += [{**statement, "Action": left}] if left else []
    return {**policy, "Statement": kept}


def test_the_writer_of_backups_can_manage_them(operator: Operator) -> None:
    """Make, list, verify and prune."""
    operator.may(KEEPER)
    assert operator.back_up("second") == 0
    for command in (["list"], PRUNE):
        assert operator.run(*command, name="") == 0
    assert operator.run("verify", name="/second") == 0
    assert operator.back_up("first") == 0


def test_the_reader_of_backups_cannot_write(operator: Operator) -> None:
    """Verify and restore work; a backup is denied."""
    operator.may(READER)
    assert operator.run("verify", "--level", "data") == 0
    assert operator.restore() == 0
    assert operator.back_up("third") == 21


@pytest.mark.parametrize("action", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"])
def test_no_right_is_one_too_many(operator: Operator, action: str) -> None:
    """Take one away, and the making or the pruning of a backup is denied."""
    operator.may(without(KEEPER, action))
    name = action.partition(":")[2].lower()
    codes = {operator.back_up(name), operator.run(*PRUNE, name="")}
    operator.may(KEEPER)
    operator.run("backup", "abort", name=f"/{name}")
    assert 21 in codes


@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:GetObject"])
def test_nor_of_a_readers(operator: Operator, action: str) -> None:
    """Take one away, and verify is denied."""
    operator.may(without(READER, action))
    assert operator.run("verify") == 21


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
