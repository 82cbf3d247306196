"""Credentials of the clouds and S3's region, and a storage location as the message that stores read."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from msgspec import Struct

from tikv_br.cluster.pb import brpb_pb2, encryptionpb_pb2
from tikv_br.environment import is_installed, missing_package
from tikv_br.errors import StorageDenied, UsageError
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.url import (
    DEFAULT_REGION,
    AzureOptions,
    GcsOptions,
    S3Options,
    StorageLocation,
    expand_home,
    is_base64,
)

if TYPE_CHECKING:
    from obstore.store import S3Credential


CHAIN_TTL = timedelta(minutes=5)
"""Time for which an answer of the chain is used; the chain renews expiring credentials in time."""

NO_S3_CREDENTIALS = "Set AWS_PROFILE, or both AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or pass both in the URL (access-key, secret-access-key)."


class S3Credentials(Struct, frozen=True):
    """One set of credentials."""

    access_key: SecretText
    secret_access_key: SecretText
    session_token: SecretText


def credential_source(options: S3Options) -> Callable[[], S3Credentials]:
    """Return a function that returns current credentials. Raises `StorageDenied` if there are none, as may that function."""
    if options.access_key:
        fixed = S3Credentials(options.access_key, options.secret_access_key, options.session_token)
        return lambda: fixed
    return _aws_chain(options)


def to_obstore_provider(source: Callable[[], S3Credentials]) -> Callable[[], S3Credential]:
    """The form in which obstore asks for credentials."""

    def provide() -> S3Credential:
        now = source()
        return {
            "access_key_id": now.access_key.reveal(),
            "secret_access_key": now.secret_access_key.reveal(),
            "token": now.session_token.reveal() or None,
            "expires_at": datetime.now(UTC) + CHAIN_TTL,
        }

    return provide


def region_of(options: S3Options) -> str:
    """The region of the options, else of the AWS environment or profile, else the Go tool's default."""
    if region := options.region or _variable("AWS_REGION"):
        return region
    if not is_installed("boto3"):
        return _variable("AWS_DEFAULT_REGION") or DEFAULT_REGION
    import boto3

    with _chain_failures("no S3 region"):  # e.g. a profile that does not exist
        return boto3.Session().region_name or DEFAULT_REGION


def _aws_chain(options: S3Options) -> Callable[[], S3Credentials]:
    if not is_installed("boto3"):  # its first source, and no other
        variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        named = S3Credentials(*(SecretText(_variable(name)) for name in variables))
        if os.environ.get("AWS_PROFILE") or not (named.access_key and named.secret_access_key):
            raise missing_package("boto3", "reading S3 credentials of profiles, roles and machines requires")
        return lambda: named
    import boto3

    for name in ("botocore.credentials", "botocore.tokens"):  # they log tracebacks of failures that we report
        logging.getLogger(name).setLevel(logging.ERROR)
    with _chain_failures("no S3 credentials"):
        session = boto3.Session()
        if not session.region_name:  # roles are assumed in a region
            session = boto3.Session(region_name=region_of(options))
        found = session.get_credentials()
    if found is None:
        raise StorageDenied("no S3 credentials found", hint=NO_S3_CREDENTIALS)
    credentials = found

    def now() -> S3Credentials:
        with _chain_failures("the S3 credentials cannot be renewed"):
            frozen = credentials.get_frozen_credentials()
        return S3Credentials(*(SecretText(part or "") for part in (frozen.access_key, frozen.secret_key, frozen.token)))

    return now


@contextmanager
def _chain_failures(what: str) -> Iterator[None]:
    """Turn the failures of all of boto3's providers into `StorageDenied` of one line."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        cause = " ".join(str(error).split())
    except OSError as error:  # a program of `credential_process`, a file with a token
        cause = f"{error.strerror or error}: {error.filename}"
    except EOFError:
        cause = "an MFA code is required, which cannot be entered here"
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        # What programs, files and servers say reaches parsers of Python unchecked.
        cause = f"{_unchecked_source()} cannot be used: {type(error).__name__}: {' '.join(str(error).split())}"
    else:
        return
    raise StorageDenied(f"{what}: {cause}", hint=NO_S3_CREDENTIALS)


def _unchecked_source() -> str:
    """The source of credentials that boto3 does not check, as far as it is known."""
    import botocore.session

    if botocore.session.Session().get_scoped_config().get("credential_process"):
        return "credential_process of the AWS profile"
    container = next((name for name in os.environ if name.startswith("AWS_CONTAINER_")), "")
    return f"the source of {container}" if container else "a source of AWS credentials"


_GCS_KEY_FILES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "SERVICE_ACCOUNT")


def gcs_credentials(options: GcsOptions) -> SecretText:
    """The content of the key file of the URL, the flags or the environment; empty = obstore finds credentials itself.

    That is the application default: GOOGLE_APPLICATION_CREDENTIALS, gcloud's login, the machine's service account. Raises
    `StorageDenied`.
    """
    if path := options.credentials_file or _variable(*_GCS_KEY_FILES):
        return _key_file(path)
    if default := _variable("GOOGLE_APPLICATION_CREDENTIALS"):
        _key_file(default)  # obstore reads it again; its messages do not name it
    return SecretText(_variable("GOOGLE_SERVICE_ACCOUNT_KEY"))


def _key_file(path: str) -> SecretText:
    path = expand_home(path)
    try:
        text = Path(path).read_text()
        readable = isinstance(json.loads(text), dict)
    except OSError as error:
        raise StorageDenied(f"the GCS credentials file {path} cannot be read: {error.strerror}") from None
    except ValueError:  # no UTF-8, no JSON
        readable = False
    if not readable:
        raise StorageDenied(
            f"the GCS credentials file {path} is not JSON", hint="Pass the key file of a service account."
        )
    return SecretText(text)


AZURE_CREDENTIALS_HINT = (
    "Set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or a service principal (AZURE_TENANT_ID, AZURE_CLIENT_ID, AZURE_CLIENT_SECRET), "
    "or run on a machine with a managed identity."
)


_AZURE_ADDRESSES = (
    "AZURE_AUTHORITY_HOST",
    "AZURE_STORAGE_AUTHORITY_HOST",
    "AZURE_MSI_ENDPOINT",
    "AZURE_IDENTITY_ENDPOINT",
    "IDENTITY_ENDPOINT",
    "MSI_ENDPOINT",
    "AZURE_FABRIC_TOKEN_SERVICE_URL",
)
"""Servers of tokens; obstore's threads end with what is no URL."""


class AzureCredentials(Struct, frozen=True):
    """The account, and its key or a SAS token; without both, obstore asks for tokens: service principal, workload or managed identity."""

    account: str
    key: SecretText
    sas_token: SecretText
    has_client_secret: bool = False
    """The environment has a service principal, which is used."""


def azure_credentials(options: AzureOptions) -> AzureCredentials:
    """Credentials in the URL or the flags, else in the variables that Azure's own tools read. Raises `StorageDenied`, `UsageError`."""
    account = options.account_name or _variable("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise UsageError(
            "the name of the Azure storage account is missing",
            hint="Pass --azblob.account-name or account-name=… in the URL, or set AZURE_STORAGE_ACCOUNT.",
        )
    key, sas_token = options.account_key, options.sas_token
    has_client_secret = bool(_variable("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET"))
    if not key and not sas_token and not has_client_secret:
        key = SecretText(_variable("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"))
        sas_token = SecretText(_variable("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY").removeprefix("?"))
    if not key and not sas_token:
        for name in _AZURE_ADDRESSES:
            if not re.match("https?://[^/]", _variable(name) or "http://none"):
                raise StorageDenied(f"{name} is not an http:// or https:// URL", hint=AZURE_CREDENTIALS_HINT)
    if key and not is_base64(key):
        raise StorageDenied(
            "the Azure account key in the environment is not base64", hint="Copy key1 or key2 of the account."
        )
    return AzureCredentials(account, key, SecretText() if key else sas_token, has_client_secret)


def _variable(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


_CIPHERS = {
    "aes128-ctr": encryptionpb_pb2.AES128_CTR,
    "aes192-ctr": encryptionpb_pb2.AES192_CTR,
    "aes256-ctr": encryptionpb_pb2.AES256_CTR,
}


KEY_IN_CLEAR = "the encryption key is sent to the stores in clear text, because the cluster is used without TLS"


def to_cipher_info(location: StorageLocation) -> brpb_pb2.CipherInfo:
    """Return the encryption that stores must use at ``location``, with the key in clear: send it over TLS."""
    crypter = location.crypter
    if not crypter.encrypts:
        return brpb_pb2.CipherInfo(cipher_type=encryptionpb_pb2.PLAINTEXT)
    return brpb_pb2.CipherInfo(cipher_type=_CIPHERS[crypter.method], cipher_key=crypter.key_bytes)


def to_backend(location: StorageLocation, *, send_credentials: bool = True) -> brpb_pb2.StorageBackend:
    """The backend message for ``location``.

    With ``send_credentials`` (the Go tool's default) the message carries the credentials that this process uses, from
    the URL or the cloud's environment, in clear: send it over TLS. Without, stores use their own. Local paths are the stores' own:
    they must be the same directory there as here. Raises `StorageDenied` when there are no credentials to send.
    """
    if location.scheme == "local":
        return brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=location.path))
    if location.scheme == "azure":
        return brpb_pb2.StorageBackend(azure_blob_storage=_azure_message(location, send_credentials=send_credentials))
    if location.scheme == "gcs":
        return brpb_pb2.StorageBackend(gcs=_gcs_message(location, send_credentials=send_credentials))
    options = location.s3
    message = brpb_pb2.S3(
        endpoint=options.endpoint,
        region=region_of(options),
        bucket=location.bucket,
        prefix=location.path,
        storage_class=options.storage_class,
        sse=options.sse,
        sse_kms_key_id=options.sse_kms_key_id,
        force_path_style=options.path_style,
        provider=options.provider,
    )
    if send_credentials:
        now = credential_source(options)()
        message.access_key = now.access_key.reveal()
        message.secret_access_key = now.secret_access_key.reveal()
        message.session_token = now.session_token.reveal()
    return brpb_pb2.StorageBackend(s3=message)


def below(backend: brpb_pb2.StorageBackend, place: StorageLocation) -> brpb_pb2.StorageBackend:
    """The message of a location, for a ``place`` below it: with the same credentials, without looking them up again."""
    message = brpb_pb2.StorageBackend()
    message.CopyFrom(backend)
    if place.scheme == "local":
        message.local.path = place.path
    elif place.scheme == "azure":
        message.azure_blob_storage.prefix = place.path
    elif place.scheme == "gcs":
        message.gcs.prefix = place.path
    else:
        message.s3.prefix = place.path
    return message


def _azure_message(location: StorageLocation, *, send_credentials: bool) -> brpb_pb2.AzureBlobStorage:
    options = location.azure
    message = brpb_pb2.AzureBlobStorage(
        endpoint=options.endpoint,
        bucket=location.bucket,
        prefix=location.path,
        storage_class=options.access_tier,
        account_name=options.account_name,
    )
    if send_credentials:
        now = azure_credentials(options)
        if not now.key and not now.sas_token:
            raise StorageDenied(
                "only an Azure account key or SAS token can be sent to the stores, not a token of an identity",
                hint="Pass --no-send-credentials-to-tikv and give the stores credentials of their own, or --engine scan.",
            )
        message.account_name = now.account
        message.shared_key = now.key.reveal()
        message.access_sig = now.sas_token.reveal()
    return message


def _gcs_key_file(options: GcsOptions) -> str:
    """The only credentials of Google that stores can be sent; empty without one."""
    return options.credentials_file or _variable(*_GCS_KEY_FILES, "GOOGLE_APPLICATION_CREDENTIALS")


def _gcs_message(location: StorageLocation, *, send_credentials: bool) -> brpb_pb2.GCS:
    options = location.gcs
    message = brpb_pb2.GCS(
        endpoint=options.endpoint, bucket=location.bucket, prefix=location.path, storage_class=options.storage_class
    )
    if send_credentials:
        path = _gcs_key_file(options)
        if not path:
            raise StorageDenied(
                "only a key file can be sent to the stores as GCS credentials, and there is none",
                hint="Pass --gcs.credentials-file, or --no-send-credentials-to-tikv if the stores have credentials of their own, or --engine scan.",
            )
        message.credentials_blob = _key_file(path).reveal()
    return message


def unreachable_by_stores(location: StorageLocation, stores: Iterable[str], *, send_credentials: bool) -> str:
    """Why stores with these addresses cannot be relied on to open ``location``; empty if nothing that is known here speaks against it.

    Raises `StorageDenied` or `UsageError` if this process has no credentials.
    """
    if location.scheme == "local":
        return "the storage is a directory of this machine"
    endpoint = urlsplit(location.options.endpoint).hostname or ""
    if _is_loopback(endpoint) and not all(_is_loopback(urlsplit(f"//{each}").hostname or "") for each in stores):
        return f"stores on other machines cannot connect to {endpoint}"
    if location.scheme == "s3" and location.s3.ca:
        return "stores do not know the authorities of --s3.ca"
    if not send_credentials:
        return ""
    if location.scheme == "s3":
        temporary = bool(credential_source(location.s3)().session_token)
        return "the credentials are temporary, and stores cannot renew them" if temporary else ""
    if location.scheme == "azure":
        azure = azure_credentials(location.azure)
        has_key = bool(azure.key or azure.sas_token)
    else:
        has_key = bool(_gcs_key_file(location.gcs))
    return "" if has_key else "the credentials are an identity of this machine, which cannot be sent to stores"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def strip_names(text: str, backend: brpb_pb2.StorageBackend, *files: str) -> str:
    """A store's message about a storage, without names given by users: bucket, prefix, endpoint and ``files``.

    Stores have no codes for what storage answers, only text, and a bucket may be called ``NoSuchKey``.
    """
    cloud: brpb_pb2.S3 | brpb_pb2.GCS | brpb_pb2.AzureBlobStorage = backend.s3
    if backend.HasField("gcs"):
        cloud = backend.gcs
    elif backend.HasField("azure_blob_storage"):
        cloud = backend.azure_blob_storage
    base = backend.local.path or cloud.prefix.strip("/")
    names = {*files, base, cloud.bucket, urlsplit(cloud.endpoint).netloc, *(f"{base}/{name}" for name in files)}
    for name in sorted(names | {quote(name) for name in names}, key=len, reverse=True):
        if name:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "", text)
    return re.sub(r"\w+://\S*", "", text)
