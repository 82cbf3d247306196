"""Options of the clouds: flags, and parameters of storage URLs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from tikv_br.resume_options import MAY_CHANGE
from tikv_br.storage import outage
from tikv_br.storage.crypter import SecretText

DEFAULT_REGION = "us-east-1"
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
    acl: str = field(default="", metadata=MAY_CHANGE)
    """Always refused. The Go tool's flag is known so that the refusal has a reason."""
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
    predefined_acl: str = field(default="", metadata=MAY_CHANGE)
    """Always refused. The Go tool's flag is known so that the refusal has a reason."""
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
