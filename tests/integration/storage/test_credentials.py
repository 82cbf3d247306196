"""Every source of credentials of every cloud, each failing: exit code 21, one line, and nothing in the log."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.utils import ContainerMetadataFetcher

from tests.support.ports import reserved_ports
from tikv_br.errors import StorageDenied, TikvBrError
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

_DENIED = """<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type><Code>AccessDenied</Code>
<Message>Not authorized</Message></Error><RequestId>1</RequestId></ErrorResponse>"""
DENIED, JUNK, EMPTY = (403, _DENIED), (200, "junk"), (200, "{}")
NOT_JSON = "JSONDecodeError"
_numbers = itertools.count()


class Issuer:
    """A server that issues credentials, or does not; and the folder with everything that is configured."""

    def __init__(self, folder: Path, url: str, dead: str) -> None:
        self.folder, self.url, self.dead = folder, url, dead
        self.answer = JUNK

    def fill(self, text: str) -> str:
        """Names in braces replaced."""
        return text.replace("{url}", self.url).replace("{dead}", self.dead).replace("{folder}", str(self.folder))


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[ThreadingHTTPServer, str]]:
    """The server, and an address at which there is none."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = getattr(self.server, "answer", JUNK)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PUT = _answer  # noqa: N815  # names that http.server wants

        def log_message(self, *_arguments: object) -> None:
            """Keep silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, reserved_ports(1) as [port]:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server, f"http://127.0.0.1:{port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def issuer(running: tuple[ThreadingHTTPServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issuer:
    """One without any configuration, environment and home directory but its own."""
    server, dead = running
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "IDENTITY_", "MSI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    (tmp_path / ".aws").mkdir()
    (tmp_path / "token").write_text("token-token")
    return Issuer(tmp_path, f"http://127.0.0.1:{server.server_port}", dead)


def _fails(issuer: Issuer, url: str, answer: tuple[int, str], server: ThreadingHTTPServer) -> TikvBrError:
    server.answer = answer  # type: ignore[attr-defined]
    with pytest.raises(StorageDenied) as caught:
        open_store(parse(issuer.fill(url))).get("object")
    assert caught.value.exit_code == 21
    assert caught.value.hint
    assert len(caught.value.message.splitlines()) == 1
    return caught.value


_WEB = {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/x", "AWS_WEB_IDENTITY_TOKEN_FILE": "{folder}/token"}
_ROLE = (
    "[profile src]\naws_access_key_id=a\naws_secret_access_key=b\n"
    "[default]\nrole_arn=arn:aws:iam::1:role/x\nsource_profile=src\n"
)
_SSO = (
    "[default]\nsso_session=s\nsso_account_id=1\nsso_role_name=r\n"
    "[sso-session s]\nsso_region=us-east-1\nsso_start_url=https://x.test/start\n"
)
_STS, _STS_DEAD = {"AWS_ENDPOINT_URL_STS": "{url}"}, {"AWS_ENDPOINT_URL_STS": "{dead}"}
_PORTAL = {"AWS_ENDPOINT_URL_SSO": "{url}"}
_CONTAINER = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{url}"}
_TOKEN = '{"accessToken":"t","expiresAt":"2099-01-01T00:00:00Z"}'


def _process(script: str) -> str:
    return f"[default]\ncredential_process=/bin/sh -c '{script}'\n"


AWS: dict[str, tuple[dict[str, str], str, tuple[int, str], str]] = {
    "nothing": ({}, "", JUNK, "no S3 credentials found"),
    "environment, half": ({"AWS_ACCESS_KEY_ID": "a"}, "", JUNK, "Partial credentials"),
    "configuration, malformed": ({}, "garbage", JUNK, "Unable to parse config file"),
    "configuration, binary": ({}, "[default]\nx=\udcff\n", JUNK, "Unable to parse config file"),
    "profile, missing": ({"AWS_PROFILE": "nowhere"}, "", JUNK, "nowhere"),
    "process, missing": ({}, "[default]\ncredential_process=/no/program\n", JUNK, "No such file or directory: /no/program"),
    "process, no program": ({}, "[default]\ncredential_process={folder}/token\n", JUNK, "Permission denied"),
    "process, unbalanced": ({}, "[default]\ncredential_process='x\n", JUNK, "credential_process of the AWS profile"),
    "process, failing": ({}, _process("echo oh no >&2; exit 3"), JUNK, "oh no"),
    "process, no JSON": ({}, _process("echo hello"), JUNK, f"credential_process .* {NOT_JSON}"),
    "process, no text": ({}, _process("printf '\\''\\377'\\''"), JUNK, "credential_process .* UnicodeDecodeError"),
    "process, a list": ({}, _process("echo []"), JUNK, "credential_process of the AWS profile"),
    "process, no version": ({}, _process("echo {}"), JUNK, "Unsupported version"),
    "process, no key": ({}, _process('echo "{\\"Version\\":1}"'), JUNK, "AccessKeyId"),
    "role, no source": ({}, "[default]\nrole_arn=arn:x\nsource_profile=no\n", JUNK, "does not exist"),
    "role, unknown source": ({}, "[default]\nrole_arn=arn:x\ncredential_source=No\n", JUNK, "not valid"),
    "role, denied": (_STS, _ROLE, DENIED, "AccessDenied"),
    "role, dead endpoint": (_STS_DEAD, _ROLE, JUNK, "Could not connect"),
    "role, malformed": (_STS, _ROLE, JUNK, "invalid XML"),
    "role, another XML": (_STS, _ROLE, (200, "<a/>"), "AssumeRoleResult"),
    "web identity, denied": (_WEB | _STS, "", DENIED, "AccessDenied"),
    "web identity, dead endpoint": (_WEB | _STS_DEAD, "", JUNK, "Could not connect"),
    "web identity, malformed": (_WEB | _STS, "", JUNK, "invalid XML"),
    "web identity, no token": (_WEB | {"AWS_WEB_IDENTITY_TOKEN_FILE": "/no/token"}, "", JUNK, "No such file or directory: /no/token"),
    "web identity, short token": (_WEB | {"AWS_WEB_IDENTITY_TOKEN_FILE": "{folder}/short"}, "", JUNK, "Parameter validation failed"),
    "web identity, no role": ({"AWS_WEB_IDENTITY_TOKEN_FILE": "{folder}/token"}, "", JUNK, "no role ARN"),
    "SSO, not logged in": ({}, _SSO, JUNK, "Token for s does not exist"),
    "SSO, malformed token": ({"TOKEN": "junk"}, _SSO, JUNK, "a source of AWS credentials cannot be used"),
    "SSO, denied": ({"TOKEN": _TOKEN, **_PORTAL}, _SSO, (401, '{"message":"no"}'), "GetRoleCredentials"),
    "SSO, dead endpoint": ({"TOKEN": _TOKEN, "AWS_ENDPOINT_URL_SSO": "{dead}"}, _SSO, JUNK, "Could not connect"),
    "SSO, malformed": ({"TOKEN": _TOKEN, **_PORTAL}, _SSO, EMPTY, "roleCredentials"),
    "container, dead endpoint": ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{dead}"}, "", JUNK, "Could not connect"),
    "container, other host": ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://example.test/x"}, "", JUNK, "Unsupported host"),
    "container, denied": (_CONTAINER, "", (403, "no"), "non 200 response 403"),
    "container, malformed": (_CONTAINER, "", JUNK, "Unable to parse JSON"),
    "container, no key": (_CONTAINER, "", EMPTY, "AWS_CONTAINER_CREDENTIALS_FULL_URI .*AccessKeyId"),
    "container, no token": (_CONTAINER | {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/no/token"}, "", JUNK, "/no/token"),
    "metadata, dead endpoint": (
        {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "{dead}"}, "", JUNK, "no S3 credentials found",
    ),
    "metadata, malformed": (
        {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "{url}"}, "", JUNK, "no S3 credentials found",
    ),
    "metadata, no address": (
        {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "no"}, "", JUNK, "Invalid endpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AWS)
def test_aws(
    issuer: Issuer,
    running: tuple[ThreadingHTTPServer, str],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each provider of boto3's chain; boto3's own log of the failure, with its traceback, is not shown."""
    variables, config, answer, sentence = AWS[case]
    (issuer.folder / "short").write_text("t\n")
    (issuer.folder / ".aws/config").write_bytes(issuer.fill(config).encode(errors="surrogateescape"))
    if "TOKEN" in variables:
        cache = issuer.folder / ".aws/sso/cache"
        cache.mkdir(parents=True)
        (cache / f"{hashlib.sha1(b's').hexdigest()}.json").write_text(variables["TOKEN"])
        for owner in ("tokens.SSOTokenProvider", "credentials.SSOProvider"):  # which are set at import
            monkeypatch.setattr(f"botocore.{owner}._SSO_TOKEN_CACHE_DIR", str(cache))
    for name, value in variables.items():
        monkeypatch.setenv(name, issuer.fill(value))
    error = _fails(issuer, "s3://bucket/p?endpoint={url}", answer, running[0])
    assert re.search(sentence, error.message), error.message
    assert caplog.records == []


_PRINCIPAL = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_AUTHORITY_HOST": "{url}"}
_SECRET = _PRINCIPAL | {"AZURE_CLIENT_SECRET": "hush"}
_REFUSED = (401, '{"error":"invalid_client"}')
_CLI = {"AZURE_USE_AZURE_CLI": "true", "PATH": "{folder}/bin:/usr/bin:/bin"}
AZURE: dict[str, tuple[dict[str, str], tuple[int, str], str]] = {
    "managed identity, dead endpoint": ({"AZURE_MSI_ENDPOINT": "{dead}"}, JUNK, "token request"),
    "managed identity, no address": ({"IDENTITY_ENDPOINT": "no"}, JUNK, "IDENTITY_ENDPOINT is not an http"),
    "service principal, dead endpoint": (_SECRET | {"AZURE_AUTHORITY_HOST": "{dead}"}, JUNK, "token request"),
    "service principal, denied": (_SECRET, _REFUSED, "401"),
    "service principal, malformed": (_SECRET, JUNK, "token response body"),
    "service principal, no tenant": ({"AZURE_CLIENT_ID": "c", "AZURE_CLIENT_SECRET": "hush"}, JUNK, "client_secret"),
    "service principal, no address": (
        _SECRET | {"AZURE_AUTHORITY_HOST": "no"},
        JUNK,
        "AZURE_AUTHORITY_HOST is not an http",
    ),
    "workload identity, no token": (
        _PRINCIPAL | {"AZURE_FEDERATED_TOKEN_FILE": "/no/token"},
        JUNK,
        "federated token file",
    ),
    "workload identity, denied": (_PRINCIPAL | {"AZURE_FEDERATED_TOKEN_FILE": "{folder}/token"}, _REFUSED, "401"),
    "CLI, missing": (_CLI | {"PATH": "/nowhere"}, JUNK, "not installed"),
    "CLI, failing": (_CLI | {"AZ": "echo please run az login >&2; exit 1"}, JUNK, "please run az login"),
    "CLI, no JSON": (_CLI | {"AZ": "echo hello"}, JUNK, "azure cli response"),
    "CLI, no switch": ({"AZURE_USE_AZURE_CLI": "maybe"}, JUNK, "maybe"),
    "key, no base64": ({"AZURE_STORAGE_KEY": "no base64!"}, JUNK, "not base64"),
    "SAS token, malformed": ({"AZURE_STORAGE_SAS_TOKEN": "hush"}, JUNK, "SAS query pair"),
    "unknown kind": ({"AZURE_CREDENTIAL_TYPE": "no"}, JUNK, "Unknown credential type"),
}


@pytest.mark.parametrize("case", AZURE)
def test_azure(
    issuer: Issuer, running: tuple[ThreadingHTTPServer, str], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source of Azure's credentials."""
    variables, answer, sentence = AZURE[case]
    program = issuer.folder / "bin/az"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{variables.get('AZ', '')}\n")
    program.chmod(0o755)
    for name, value in variables.items():
        monkeypatch.setenv(name, issuer.fill(value))
    # An address that has failed is not asked again at once: each case has its own container.
    url = f"azure://container{next(_numbers)}/p?endpoint={{url}}/acct&account-name=acct"
    error = _fails(issuer, url, answer, running[0])
    assert sentence in error.message
    assert "hush" not in str(error.to_json())


GCS: dict[str, tuple[str | None, str]] = {
    "missing": (None, "key.json cannot be read: No such file"),
    "no JSON": ("hush", "key.json is not JSON"),
    "no object": ("[]", "key.json is not JSON"),
    "no kind": ("{}", "missing field `type`"),
    "another kind": ('{"type":"external_account"}', "unknown variant `external_account`"),
    "no key": ('{"type":"service_account"}', "missing field `private_key`"),
    "a key that is none": (
        '{"type":"service_account","private_key":"hush","private_key_id":"y","client_email":"z"}', "pem file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variable", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "SERVICE_ACCOUNT"])
@pytest.mark.parametrize("case", GCS)
def test_gcs(
    issuer: Issuer, running: tuple[ThreadingHTTPServer, str], case: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way in which the key file of Google's is none; files of type `service_account` are all that the latter two may name."""
    text, sentence = GCS[case]
    path = issuer.folder / "key.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(variable, str(path))
    error = _fails(issuer, "gcs://bucket/p?endpoint={url}", JUNK, running[0])
    assert sentence in error.message or (
        variable != "GOOGLE_APPLICATION_CREDENTIALS" and "missing field" in error.message
    )
    assert "hush" not in str(error.to_json())
