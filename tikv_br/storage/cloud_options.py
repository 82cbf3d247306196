"""Options of the clouds: flags, and parameters of storage URLs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from tikv_br.environment import is_installed, missing_package
from tikv_br.errors import StorageDenied, UsageError
from tikv_br.resume_options import MAY_CHANGE
from tikv_br.storage import outage
from tikv_br.storage.crypter import SecretText

DEFAULT_REGION = "us-east-1"
NO_TEXT = "the storage URL contains bytes that are not UTF-8"
_ENCRYPTIONS = ("", "AES256", "aws:kms", "aws:kms:dsse")
_TRUE = frozenset({"1", "t", "true"})
_FALSE = frozenset({"0", "f", "false"})
VIRTUAL_HOST_PROVIDERS = frozenset({"alibaba", "netease"})
"""Providers that know no path-style requests; the Go tool's list."""


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options of S3: the ``--s3.*`` flags and the URL's parameters. ``""`` = not specified."""

    endpoint: str = ""
    """``http://`` or ``https://`` URL; ``""`` = Amazon's of the region."""
    region: str = ""
    storage_class: str = field(default="", metadata=MAY_CHANGE)
    sse: str = field(default="", metadata=MAY_CHANGE)
    sse_kms_key_id: str = field(default="", metadata=MAY_CHANGE)
    provider: str = ""
    ca: str = field(default="", metadata=MAY_CHANGE)
    """Path of a PEM file of authorities to trust besides the system's, wherever a task runs; only a flag, for it is of the machine."""
    force_path_style: bool | None = field(default=None, metadata=MAY_CHANGE)
    """Bucket in the path, not in the host name; ``None`` = yes, but for `VIRTUAL_HOST_PROVIDERS`."""
    patience: float = field(default=outage.PATIENCE_SECONDS, compare=False, metadata=MAY_CHANGE)
    """Maximum seconds of an outage to wait, at any cloud: see `StorageLocation.patience`. Only a flag, not part of the URL."""
    access_key: SecretText = field(default_factory=SecretText, metadata=MAY_CHANGE)
    secret_access_key: SecretText = field(default_factory=SecretText, metadata=MAY_CHANGE)
    session_token: SecretText = field(default_factory=SecretText, metadata=MAY_CHANGE)

    @property
    def path_style(self) -> bool:
        """`force_path_style`, or the default of the provider."""
        if self.provider.lower() in VIRTUAL_HOST_PROVIDERS:
            return False
        return self.force_path_style is not False

    @property
    def server(self) -> str:
        """The endpoint, or what distinguishes it from others."""
        return self.endpoint or self.region


@dataclass(frozen=True, slots=True)
class AzureOptions:
    """Options of Azure Blob Storage: the ``--azblob.*`` flags and the URL's parameters. ``""`` = not specified."""

    endpoint: str = ""
    """``http://`` or ``https://`` URL of the account, without the container; ``""`` = Azure's of the account."""
    account_name: str = ""
    access_tier: str = field(default="", metadata=MAY_CHANGE)
    account_key: SecretText = field(default_factory=SecretText, metadata=MAY_CHANGE)
    sas_token: SecretText = field(default_factory=SecretText, metadata=MAY_CHANGE)

    @property
    def storage_class(self) -> str:
        """Storage class of new objects."""
        return self.access_tier

    @property
    def server(self) -> str:
        """The endpoint, or what distinguishes it from others."""
        return self.endpoint or f"azure:{self.account_name}"


@dataclass(frozen=True, slots=True)
class GcsOptions:
    """Options of Google Cloud Storage: the ``--gcs.*`` flags and the URL's parameters. ``""`` = not specified."""

    endpoint: str = ""
    """``http://`` or ``https://`` URL; ``""`` = Google's."""
    storage_class: str = field(default="", metadata=MAY_CHANGE)
    credentials_file: str = field(default="", metadata=MAY_CHANGE)
    """Path of a service account's key on each machine that runs tasks; no secret itself."""

    @property
    def server(self) -> str:
        """The endpoint, or what distinguishes it from others."""
        return self.endpoint or "gcs"


CloudOptions: TypeAlias = S3Options | AzureOptions | GcsOptions


@dataclass(frozen=True, slots=True)
class CloudFlags:
    """Flags of all clouds; a URL's parameters override them."""

    s3: S3Options = field(default_factory=S3Options)
    azure: AzureOptions = field(default_factory=AzureOptions)
    gcs: GcsOptions = field(default_factory=GcsOptions)


def decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise UsageError(NO_TEXT) from None


def read_parameters(query: str, kind: type[CloudOptions]) -> dict[str, Any]:
    readers = {name: _READERS[of] for name, of in _fields(kind).items()}
    if kind is S3Options:
        readers["use_accelerate_endpoint"] = _no_acceleration
    found: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        raw_name, _, raw_value = part.partition("=")
        name = raw_name.lower().replace("-", "_")
        reader = readers.get(name)
        if reader is None:
            known = ", ".join(sorted(known.replace("_", "-") for known in readers))
            raise UsageError(f"unknown parameter {raw_name!r} in the storage URL", hint=f"Supported: {known}.")
        if name in found:
            raise UsageError(f"parameter {raw_name!r} appears twice in the storage URL")
        found[name] = reader(name, decoded(raw_value))
    found.pop("use_accelerate_endpoint", None)
    return found


def _flag(name: str, value: str) -> bool:
    if value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise UsageError(f"parameter {name.replace('_', '-')!r} of the storage URL must be true or false")


def _no_acceleration(name: str, value: str) -> bool:
    if _flag(name, value):
        raise UsageError("accelerated endpoints of S3 are not supported", hint="Leave out use-accelerate-endpoint.")
    return False


_READERS: dict[str, Callable[[str, str], object]] = {
    "str": lambda _name, value: value,
    "bool | None": _flag,
    "SecretText": lambda _name, value: SecretText(value),
}
"""Readers of parameters by the types of the fields that they fill."""
_OF_MACHINE = {"ca", "credentials_file"}
"""Paths on the machine of a task, which no URL shows."""


def public_parameters(options: CloudOptions) -> dict[str, str]:
    """The parameters without secrets that are set, in the order of the fields."""
    values = {name: getattr(options, name) for name in _fields(type(options)) if name not in _OF_MACHINE}
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return {name.replace("_", "-"): text for name, text in texts.items() if text and isinstance(text, str)}


def _fields(kind: type[CloudOptions]) -> dict[str, str]:
    """Names and types of the fields that parameters fill."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    return {name: of for name, of in types.items() if of in _READERS and name != "ca"}


def expand_home(path: str) -> str:
    """A path in which ``~`` is the home directory; unchanged for a user without one."""
    return os.path.expanduser(path)  # noqa: PTH111  # that of `Path` raises an error for such users


def aws_endpoint() -> str:
    """The endpoint of S3 that the AWS environment or profile names, ``""`` = none.

    It becomes part of the location, so that tasks and stores on other machines use the same server. Raises `StorageDenied` if the
    profile cannot be read.
    """
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # the last one is of obstore's
    named = next((value for name in variables if (value := os.environ.get(name, "").strip())), "")
    files = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
    if not named and not any(Path(expand_home(os.environ.get(*file))).exists() for file in files.items()):
        return ""
    if not is_installed("botocore"):
        if named:
            ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").strip().lower() == "true"
            return "" if ignored else named
        raise missing_package("botocore", "reading ~/.aws, which may name an endpoint, requires")
    import botocore.session
    from botocore.exceptions import BotoCoreError

    session = botocore.session.Session()
    try:
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return ""
        if named:
            return named
        profile = session.get_scoped_config()
        service = session.full_config.get("services", {}).get(profile.get("services"), {}).get("s3")
    except BotoCoreError as error:
        raise StorageDenied(
            f"the AWS configuration cannot be read: {error}", hint="Check AWS_PROFILE and ~/.aws/config."
        ) from None
    special = service.get("endpoint_url") if isinstance(service, dict) else None
    return str(special or profile.get("endpoint_url") or "")


def check_s3(options: S3Options) -> None:
    check_endpoint(options.endpoint)
    if options.sse not in _ENCRYPTIONS:
        raise UsageError(f"s3.sse must be one of {', '.join(_ENCRYPTIONS[1:])}, not {options.sse!r}")
    if options.sse_kms_key_id and not options.sse.startswith("aws:kms"):
        raise UsageError("s3.sse-kms-key-id requires s3.sse aws:kms")
    if bool(options.access_key) != bool(options.secret_access_key):
        raise UsageError("the URL must have both or none of (access-key, secret-access-key)")
    if options.session_token and not options.access_key:
        raise UsageError("a session token requires both of (access-key, secret-access-key)")


def check_endpoint(endpoint: str, cloud: str = "S3", *, has_path: bool = False) -> None:
    if not endpoint:
        return
    hint = "Write http://host:port or https://host:port."
    try:
        parts = urlsplit(endpoint)
        host, _port = parts.hostname, parts.port
    except ValueError:
        raise UsageError(f"the {cloud} endpoint does not parse", hint=hint) from None
    if parts.scheme not in {"http", "https"} or not host:
        raise UsageError(f"the {cloud} endpoint is not an http:// or https:// URL", hint=hint)
    if "@" in parts.netloc or parts.query or parts.fragment or (parts.path.strip("/") and not has_path):
        raise UsageError(f"the {cloud} endpoint must have only scheme, host and port", hint=hint)
