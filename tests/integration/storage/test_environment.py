"""What a URL or flag fixes, no variable of the environment and no profile changes: every one that obstore or boto3 reads."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import botocore.session
import obstore
import pytest
from botocore import credentials as botocore_credentials

from tikv_br.errors import StorageConflict, StorageDenied, UsageError
from tikv_br.storage.credentials import to_backend
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import AzureOptions, CloudFlags, GcsOptions, S3Options, StorageLocation, parse

_AWS = (
    "access_key_id secret_access_key default_region region bucket bucket_name endpoint_url endpoint endpoint_url_s3 endpoint_url_sts "
    "session_token token virtual_hosted_style_request s3_express imdsv1_fallback metadata_endpoint unsigned_payload "
    "checksum_algorithm container_credentials_relative_uri container_credentials_full_uri container_authorization_token_file "
    "web_identity_token_file role_arn role_session_name skip_signature copy_if_not_exists conditional_put disable_tagging "
    "disable_bulk_delete request_payer server_side_encryption sse_kms_key_id sse_bucket_key_enabled sse_customer_key_base64"
)
_AZURE = (
    "storage_account storage_account_key storage_access_key storage_master_key storage_key storage_account_name storage_client_id "
    "client_id storage_client_secret client_secret storage_tenant_id storage_authority_id tenant_id authority_id "
    "storage_authority_host authority_host storage_sas_key storage_sas_token storage_token storage_use_emulator storage_endpoint "
    "endpoint msi_endpoint identity_endpoint object_id msi_resource_id federated_token_file use_fabric_endpoint use_azure_cli "
    "skip_signature container_name disable_tagging fabric_token_service_url fabric_workload_host fabric_session_token "
    "fabric_cluster_identifier credential_type storage_encryption_key encryption_key storage_connection_string"
)
_GOOGLE = (
    "service_account service_account_path service_account_key bucket bucket_name base_url application_credentials bearer_token "
    "skip_signature"
)
_CLIENT = (
    "allow_http allow_invalid_certificates disable_system_certificates connect_timeout default_content_type http1_only http2_only "
    "http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_max_frame_size pool_idle_timeout "
    "pool_max_idle_per_host proxy_url proxy_ca_certificate proxy_excludes randomize_addresses read_timeout timeout user_agent"
)
"""Names that object_store 0.14 accepts in the environment (`AmazonS3ConfigKey`, `AzureConfigKey`, `GoogleConfigKey`, `ClientConfigKey`)."""
_OTHERS = {
    "azure": ["AZURITE_BLOB_STORAGE_URL", "IDENTITY_ENDPOINT", "MSI_ENDPOINT"],
    "gcs": ["SERVICE_ACCOUNT", "STORAGE_EMULATOR_HOST"],
}


def _variables(prefix: str, names: str) -> list[str]:
    return [f"{prefix}_{name.upper()}" for name in f"{names} {_CLIENT}".split()]


def _of_boto() -> list[str]:
    """Every variable of boto3: its session's settings, and those of its providers of credentials."""
    source = inspect.getsource(botocore.session) + inspect.getsource(botocore_credentials)
    settings = inspect.getsource(__import__("botocore.configprovider", fromlist=["*"]))
    return sorted(set(re.findall(r"['\"](AWS_[A-Z0-9_]+|BOTO_[A-Z_]+)['\"]", source + settings)))


VARIABLES = {
    "s3": sorted({*_variables("AWS", _AWS), *_of_boto()}),
    "azure": _variables("AZURE", _AZURE) + _OTHERS["azure"],
    "gcs": _variables("GOOGLE", _GOOGLE) + _OTHERS["gcs"],
}
EVIL = ("{wrong}", "true", "junk")
"""Values: the wrong server, a switch, and what no setting understands."""


@dataclass
class Server:
    """Notes each request: method, target, and the headers that settings change."""

    url: str = ""
    seen: list[tuple[str, str, str, tuple[tuple[str, str], ...]]] = field(default_factory=list)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """The server that the URL names, and one that only the environment names."""
    running = []
    for _ in range(2):
        server = Server()
        handler = type("Handler", (_Handler,), {"server_notes": server})
        http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        running.append((server, http, thread))
    yield running[0][0], running[1][0]
    for _server, http, thread in running:
        http.shutdown()
        thread.join()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_notes: Server

    def _answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        skipped = {"host", "date", "x-amz-date", "x-ms-date", "x-ms-client-request-id", "user-agent"}
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in skipped}
        # Signatures depend on the time; who signs, for which region, and what, does not.
        headers["authorization"] = re.sub(r"(Signature=|SharedKey \w+:).*", r"\1", headers.get("authorization", ""))
        headers["authorization"] = re.sub(r"/\d{8}/", "/DATE/", headers["authorization"])
        target = re.sub(r"sig=[^&]*", "", self.path)
        self.server_notes.seen.append((self.command, target, str(len(data)), tuple(sorted(headers.items()))))
        conditional = "if-none-match" in headers or "x-goog-if-generation-match" in headers
        self.send_response(412 if conditional else 200)
        self.send_header("Content-Length", "1")
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 10:00:00 GMT")
        self.send_header("ETag", '"mark"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"x")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815  # names that http.server wants

    def log_message(self, *_arguments: object) -> None:
        """Keep silent."""


def _location(cloud: str, server: Server, tmp_path: Path) -> StorageLocation:
    """A place of which every setting is in the URL or a flag."""
    match cloud:
        case "s3":
            keys = "access-key=AKIA&secret-access-key=hush&session-token=token"
            return parse(f"s3://bucket/p?endpoint={server.url}&region=here&sse=aws:kms&{keys}")
        case "azure":
            return parse(f"azure://container/p?endpoint={server.url}/acct&account-name=acct&account-key=a2V5")
        case _:
            key = tmp_path / "key.json"
            text = {"private_key": "k", "private_key_id": "k", "client_email": "e", "disable_oauth": True}
            key.write_text(json.dumps(text))
            return parse(f"gcs://bucket/p?endpoint={server.url}", CloudFlags(gcs=GcsOptions(credentials_file=str(key))))


def _use(location: StorageLocation) -> None:
    """One request of each kind that has settings."""
    store = open_store(location)
    store.put("object", b"x")
    with pytest.raises(StorageConflict):
        store.put_if_absent("object", b"x")
    store.get("object")


@pytest.mark.parametrize("cloud", VARIABLES)
def test_no_variable_changes_what_the_url_fixes(
    servers: tuple[Server, Server], tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each variable, at each value, exactly the same requests reach the server of the URL, and none another one."""
    right, wrong = servers
    location = _location(cloud, right, tmp_path)
    for name in VARIABLES[cloud]:
        monkeypatch.delenv(name, raising=False)
    _use(location)  # the first contact is a probe more
    right.seen.clear()
    _use(location)
    expected = list(right.seen)
    for name in VARIABLES[cloud]:
        for value in EVIL:
            right.seen.clear()
            with monkeypatch.context() as changed:
                changed.setenv(name, value.format(wrong=wrong.url))
                _use(_location(cloud, right, tmp_path))
            assert right.seen == expected, (name, value)
    assert wrong.seen == []


def test_variables_are_all_that_obstore_documents() -> None:
    """A new variable in obstore's documentation must be added to the list above."""
    folder = Path(obstore.__file__).parent / "_store"
    documented = {
        name
        for file in ("_aws", "_azure", "_gcs", "_client")
        for name in re.findall(r"`((?:AWS|AZURE|GOOGLE)_[A-Z0-9_]+)`", (folder / f"{file}.pyi").read_text())
    }
    assert documented - {"AWS_STS_ENDPOINT"} <= {name for names in VARIABLES.values() for name in names}
    assert len(documented) > 40


@pytest.mark.parametrize(
    "section", ["endpoint_url = {wrong}", "services = local\n[services local]\ns3 =\n  endpoint_url = {wrong}"]
)
def test_profile_does_not_change_what_the_url_fixes(
    servers: tuple[Server, Server], tmp_path: Path, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the configuration file: endpoint of the profile, and of a section `services`."""
    right, wrong = servers
    config = tmp_path / "config"
    config.write_text("[default]\nregion = there\n" + section.format(wrong=wrong.url))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    _use(_location("s3", right, tmp_path))
    assert wrong.seen == []
    # Without an endpoint in URL and flags, the profile names it, for us and for the stores; a flag wins.
    assert parse("s3://bucket/p").s3.endpoint == wrong.url
    assert parse("s3://bucket/p", CloudFlags(S3Options(endpoint=right.url))).s3.endpoint == right.url


def test_endpoint_of_the_environment_is_part_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the environment names the endpoint, it is shown, recorded, sent to stores, and used on every machine."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://special:1/")
    location = parse("s3://bucket/p?access-key=a&secret-access-key=b&region=r")
    assert location.redacted() == "s3://bucket/p?endpoint=http://special:1&region=r"
    assert to_backend(location).s3.endpoint == "http://special:1"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert parse("s3://bucket/p").s3.endpoint == ""
    monkeypatch.delenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "special:1")
    with pytest.raises(UsageError, match="configured S3 endpoint is not an http"):
        parse("s3://bucket/p")


def test_region_of_the_environment(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_REGION, then AWS_DEFAULT_REGION: the same for our requests and for the stores."""
    right, _wrong = servers
    monkeypatch.setenv("AWS_DEFAULT_REGION", "second")
    monkeypatch.setenv("AWS_REGION", "first")
    location = parse(f"s3://bucket/p?endpoint={right.url}&access-key=a&secret-access-key=b")
    right.seen.clear()
    open_store(location).get("object")
    assert "/first/s3/aws4_request" in dict(right.seen[-1][3])["authorization"]
    assert to_backend(location).s3.region == "first"


@pytest.mark.parametrize(
    ("variable", "value", "url"),
    [
        ("AZURE_STORAGE_USE_EMULATOR", "true", "azure://container/p?account-name=acct&account-key=a2V5"),
        ("STORAGE_EMULATOR_HOST", "localhost:4443", "gcs://bucket/p"),
    ],
)
def test_emulators_are_named_by_an_endpoint(
    variable: str, value: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that sends other clients to an emulator is refused where nothing names a server; an endpoint wins."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=f"{variable} is set"):
        parse(url)
    assert (
        parse(f"{url}{'&' if '?' in url else '?'}endpoint=http://localhost:1").options.endpoint == "http://localhost:1"
    )


def test_credentials_of_the_url_replace_those_of_flags() -> None:
    """A SAS token in the URL and an account key as a flag: the URL's."""
    flags = CloudFlags(azure=AzureOptions(account_key=SecretText("a2V5")))
    location = parse("azure://container/p?account-name=acct&sas-token=sv=1", flags)
    assert (location.azure.account_key, location.azure.sas_token) == (SecretText(), SecretText("sv=1"))


def test_profile_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AWS_PROFILE without a profile is an error that names it, where region or endpoint would come from it."""
    (tmp_path / "config").write_text("[default]\nregion = here\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(StorageDenied, match="nowhere"):
        parse("s3://bucket/p?access-key=a&secret-access-key=b")
    with pytest.raises(StorageDenied, match="nowhere"):
        open_store(parse("s3://bucket/p?endpoint=http://127.0.0.1:9&access-key=a&secret-access-key=b"))
    open_store(parse("s3://bucket/p?endpoint=http://127.0.0.1:9&access-key=a&secret-access-key=b&region=r"))
