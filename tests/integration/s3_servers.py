"""S3 servers for tests, on free ports of 127.0.0.1: moto for breadth, versitygw for truth."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from tests.support.certificates import KeyPair
from tests.support.ports import reserved_ports
from tests.support.tools import find_tool
from tikv_br.storage.url import StorageLocation, parse

ACCESS_KEY = "tester"
SECRET_KEY = "s3cr+t/key=with&signs"
BUCKET = "backups"
START_TIMEOUT = 90.0


@dataclass(frozen=True)
class S3Server:
    """A running server with `BUCKET` in it."""

    endpoint: str
    """``http(s)://127.0.0.1:PORT``."""
    process: subprocess.Popen[bytes]
    admin: Any
    """boto3's S3 client: an independent view of what is stored."""

    def url(self, prefix: str = "", bucket: str = BUCKET, **parameters: str) -> str:
        """An ``s3://`` URL with endpoint and credentials, some replaced by ``parameters``."""
        said = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access-key": ACCESS_KEY,
            "secret-access-key": SECRET_KEY.replace("&", "%26"),
            "force-path-style": "true",
        } | {name.replace("_", "-"): value for name, value in parameters.items()}
        return f"s3://{bucket}/{prefix}?" + "&".join(f"{name}={value}" for name, value in said.items() if value)

    def location(self, prefix: str = "", bucket: str = BUCKET, **parameters: str) -> StorageLocation:
        """`url`, parsed."""
        return parse(self.url(prefix, bucket, **parameters))

    def freeze(self) -> None:
        """Stop the server where it is: its port takes connections, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        while any((each / "stat").read_text().rpartition(")")[2].split()[0] != "T" for each in threads.iterdir()):
            time.sleep(0.01)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze it for the length of the block."""
        self.freeze()
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the server at once; its port then refuses connections."""
        self.process.kill()
        self.process.wait()


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """Run moto in a process of its own; it believes every secret and every region."""
    with reserved_ports(1) as [port]:
        arguments = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with _running(arguments, port) as server:
            yield server


@contextmanager
def versitygw_server(
    folder: Path, *, port: int = 0, options: Sequence[str] = (), tls: KeyPair | None = None
) -> Iterator[S3Server]:
    """Run versitygw over a directory: a real S3 server, which checks signatures, regions and conditions."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext([port]) if port else reserved_ports(1) as [number]:
        arguments = [find_versitygw(), "--port", f"127.0.0.1:{number}", "--access", ACCESS_KEY, "--secret", SECRET_KEY]
        scheme = "https" if tls else "http"
        if tls:
            arguments += ["--cert", str(tls.cert), "--key", str(tls.key)]
        with _running([*arguments, "--quiet", *options, "posix", str(folder)], number, scheme) as server:
            yield server


def find_versitygw() -> str:
    """Its path; where it is missing, the test ends."""
    return find_tool("versitygw", hint="run scripts/install_versitygw.sh, or set VERSITYGW", variable="VERSITYGW")


@contextmanager
def _running(arguments: list[str], port: int, scheme: str = "http") -> Iterator[S3Server]:
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_bare_environment())
    try:
        await_port(port, process)
        endpoint = f"{scheme}://127.0.0.1:{port}"
        admin = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            verify=scheme == "http",  # what the test does trusts on its own
        )
        if "--readonly" not in arguments and BUCKET not in [item["Name"] for item in admin.list_buckets()["Buckets"]]:
            admin.create_bucket(Bucket=BUCKET)
        try:
            yield S3Server(endpoint, process, admin)
        finally:
            admin.close()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "VGW_", "MOTO_"))}


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return once the server accepts connections. Raises `RuntimeError` if it ends, or does not start."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at once with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("the server did not start")
