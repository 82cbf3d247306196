"""Places without secrets: all output of a run on Spark that gets them in flags and environment, with all logs on."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.e2e.conftest import Playgrounds
from tests.integration.s3_servers import BUCKET, SECRET_KEY, moto_server
from tests.support.openssl import KEYS

KEY = KEYS["aes256-ctr"]
TOKEN = "a-session-token-that-is-secret"


def forms() -> list[bytes]:
    """The secrets as text, raw, in base64 and as parts of a URL."""
    raw = bytes.fromhex(KEY)
    texts = [KEY, KEY.upper(), base64.b64encode(raw).decode(), SECRET_KEY, SECRET_KEY.replace("&", "%26"), TOKEN]
    return [raw, *(text.encode() for text in texts)]


def shown(data: bytes) -> list[bytes]:
    """The secrets that stand in ``data``."""
    return [secret for secret in forms() if secret in data]


def command_lines(program: subprocess.Popen[bytes]) -> list[bytes]:
    """Arguments that `ps` shows of all processes that a running program has started; until exec they are the program's."""
    lines = []
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(program.pid)
        own = parent.cmdline()
        for process in parent.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (line := process.cmdline()) != own:
                    lines.append(" ".join(line).encode())
    return lines


def on_disk(folder: Path) -> dict[Path, bytes]:
    """Files in a folder at the moment, while others come and go."""
    found = {}
    for place, _folders, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.read_bytes()
    return found


def watch(program: subprocess.Popen[bytes], scratch: Path) -> Iterator[bytes]:
    """Look at the processes that the program starts, and at Spark's scratch files, until it ends; yields their command lines.

    The program's own command line shows what the user wrote on it: a warning says so.
    """
    while True:
        try:
            program.wait(0.2)
        except subprocess.TimeoutExpired:
            others = command_lines(program)
            assert not any(shown(line) for line in others), others
            assert not [path for path, data in on_disk(scratch).items() if shown(data)]
            yield from others
        else:
            return


@pytest.mark.slow
def test_a_run_on_spark_leaves_and_shows_no_secret(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """stdout, stderr at debug, log file, Spark's event log and scratch files, every object, and `ps`: rows, S3 secret and cipher key in none."""
    events, log_file = tmp_path / "events", tmp_path / "log"
    scratch = tmp_path / "scratch"
    events.mkdir()
    scratch.mkdir()
    settings = {"eventLog.enabled": "true", "eventLog.dir": events.as_uri(), "local.dir": scratch}
    lines = [f"spark.{name} {value}" for name, value in settings.items()]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    succeed("raw", "put", "row", "a value to hide", "--pd", playgrounds["v1"])
    with moto_server() as server:
        command = [
            *("backup", "raw", "--pd", playgrounds["v1"], "--engine", "scan", "--executor", "spark"),
            *("-s", server.url("folder/first", session_token=TOKEN), "--spark-master", "local[1]"),
            *("--spark-conf", f"spark.hadoop.fs.s3a.secret.key={SECRET_KEY}"),
            *("--crypter.method", "aes256-ctr", "--crypter.key", KEY, "--output", "json"),
            *("--log-level", "debug", "--log-file", str(log_file), "--log-format", "json"),
        ]
        with (tmp_path / "out").open("wb") as out:
            program = subprocess.Popen(
                [str(PROGRAM), *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(
                    SPARK_CONF_DIR=str(tmp_path), TIKV_BR_CRYPTER_KEY=KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY
                ),
            )
            with program:
                seen = [line for line in watch(program, scratch) if line]
        said = (tmp_path / "out").read_bytes()
        assert program.returncode == 0, said
        names = [item["Key"] for item in server.admin.list_objects_v2(Bucket=BUCKET)["Contents"]]
        objects = {name: server.admin.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}
    assert any(b"java" in line for line in seen)
    recorded = [path for path in events.rglob("*") if path.is_file()]
    assert recorded, "Spark wrote no event log"
    left = {str(path): path.read_bytes() for path in (tmp_path / "out", log_file, *recorded)} | objects
    assert {name for name, data in left.items() if shown(data)} == set()
    assert {name for name, data in left.items() if b"a value to hide" in data} == set()
    assert json.loads(said.splitlines()[-1])["message_type"] == "summary"


def test_no_error_repeats_a_secret(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Secrets in places where they do not belong, and a storage that is not there: no message has them, in no form."""
    nowhere = f"s3://bkt/p?endpoint=http://127.0.0.1:1&access-key=a&secret-access-key={KEY}"
    wrong = [
        ["backup", "raw", "--pd", playgrounds["v1"], "-s", nowhere, "--engine", "store"],
        ["backup", "raw", nowhere],
        ["backup", "raw", "--pd", "127.0.0.1:1", "-s", str(tmp_path), "--crypter.key", KEY, "--no-such-flag"],
        ["verify", nowhere, "--crypter.key", KEY],
        ["list", "-s", nowhere, "--crypter.key", KEY],
        ["config", "show", "backup", "raw"],
    ]
    for arguments in wrong:
        done = tikv_br(*arguments, "--log-level", "debug", TIKV_BR_CRYPTER_KEY=KEY, TIKV_BR_STORAGE=nowhere)
        assert (done.code == 0) == (arguments[0] == "config"), done
        assert not shown((done.out + done.err).encode()), arguments
