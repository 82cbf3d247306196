"""Servers of other clouds than Amazon's for tests, on free ports of 127.0.0.1."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from tests.integration.s3_servers import await_port
from tests.support.ports import reserved_ports
from tests.support.tools import find_tool
from tikv_br.storage.url import StorageLocation, parse

ACCOUNT = "tester"
ACCOUNT_KEY = base64.b64encode(b"a key with + and / in base64: \xff\xef\xbe\xfb").decode()
CONTAINER = "backups"
_VERSION = "2021-08-06"


@dataclass(frozen=True)
class AzureServer:
    """A running Azurite with `CONTAINER` in it."""

    endpoint: str
    """``http://127.0.0.1:PORT/ACCOUNT``."""
    process: subprocess.Popen[bytes] | None
    """``None`` = it does not run."""

    def url(self, prefix: str = "", container: str = CONTAINER, **parameters: str) -> str:
        """An ``azure://`` URL with endpoint and credentials, some replaced by ``parameters``."""
        said = {"endpoint": self.endpoint, "account-name": ACCOUNT, "account-key": ACCOUNT_KEY} | {
            name.replace("_", "-"): value.replace("&", "%26") for name, value in parameters.items()
        }
        return f"azure://{container}/{prefix}?" + "&".join(f"{name}={value}" for name, value in said.items() if value)

    def location(self, prefix: str = "", container: str = CONTAINER, **parameters: str) -> StorageLocation:
        """`url`, parsed."""
        return parse(self.url(prefix, container, **parameters))

    def request(
        self, method: str, path: str, query: str = "", headers: Mapping[str, str] | None = None
    ) -> tuple[dict[str, str], bytes]:
        """A request without a body, signed here: an independent view of what is stored. Returns headers and body."""
        said = {
            "x-ms-date": email.utils.formatdate(usegmt=True),
            "x-ms-version": _VERSION,
            **(headers or {}),
        }
        target = f"{self.endpoint}/{quote(path)}"
        signed = "".join(f"{name}:{value}\n" for name, value in sorted(said.items()))
        resource = f"/{ACCOUNT}{urlsplit(target).path}" + "".join(
            f"\n{name}:{value}" for name, value in sorted(parse_qsl(query, keep_blank_values=True))
        )
        said["Authorization"] = f"SharedKey {ACCOUNT}:{sign(f'{method}{chr(10) * 12}{signed}{resource}')}"
        request = urllib.request.Request(f"{target}?{query}", method=method, headers=said)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return {name.lower(): value for name, value in answer.headers.items()}, answer.read()

    def sas_token(self, permissions: str) -> str:
        """A SAS token of the account for containers and objects, valid for years."""
        fields = {"sv": _VERSION, "ss": "b", "srt": "co", "sp": permissions, "se": "2099-01-01T00:00:00Z"}
        text = f"{ACCOUNT}\n{permissions}\nb\nco\n\n{fields['se']}\n\n\n{_VERSION}\n\n"
        return "&".join(f"{name}={quote(value, safe='')}" for name, value in (fields | {"sig": sign(text)}).items())


def sign(text: str) -> str:
    """Azure's signature of a text with `ACCOUNT_KEY`."""
    return base64.b64encode(hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()).decode()


@contextmanager
def azurite_server(folder: Path | None = None, *, port: int = 0) -> Iterator[AzureServer]:
    """Run Azurite: it checks signatures, SAS tokens and conditions. In memory, or in a folder that it can be started in again."""
    program = find_tool("azurite-blob", hint="run scripts/install_azurite.sh, or set AZURITE", variable="AZURITE")
    with contextlib.nullcontext([port]) if port else reserved_ports(1) as [number]:
        place = ["--location", str(folder)] if folder else ["--inMemoryPersistence"]
        arguments = [program, "--blobHost", "127.0.0.1", "--blobPort", str(number), *place, "--silent"]
        process = subprocess.Popen(
            [*arguments, "--skipApiVersionCheck", "--disableTelemetry"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"},
        )
        try:
            await_port(number, process)
            server = AzureServer(f"http://127.0.0.1:{number}/{ACCOUNT}", process)
            with contextlib.suppress(urllib.error.HTTPError):  # there since the last start
                server.request("PUT", CONTAINER, "restype=container")
            yield server
        finally:
            # It saves its index every five seconds, and when it ends.
            process.send_signal(signal.SIGTERM if folder else signal.SIGKILL)
            process.wait()
