"""The end of an etcd beside a playground."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from tikv_br.playground import etcd
from tikv_br.playground.etcd import EtcdServer

DEAF = f"""\
#!{sys.executable}
import signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


url = next(each for each in sys.argv if each.startswith("--listen-client-urls="))
HTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), Healthy).serve_forever()
"""


def test_one_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping a playground does not wait without limit for an etcd that ignores signals."""
    program = tmp_path / "etcd"
    program.write_text(textwrap.dedent(DEAF))
    program.chmod(0o755)
    monkeypatch.setattr(etcd, "STOP_SECONDS", 0.1)
    with EtcdServer(tmp_path / "data", program=str(program)) as server:
        process = server.process
    assert process.returncode == -9
