"""Parses storage URLs, as the Go TiKV-BR writes them, to a `StorageLocation`.

===============================================  =========================================================
``/backup/1``                                    a local directory
``local:///backup/1``, ``file:///backup/1``      the same, percent-decoded
``s3://bucket/prefix?endpoint=…&region=…``       S3; parameters override the ``--s3.*`` flags of that name
``gcs://bucket/prefix?credentials-file=…``      Google Cloud Storage, also ``gs://``; likewise with ``--gcs.*``
``azure://container/prefix?account-name=…``      Azure Blob Storage, also ``azblob://``; likewise with ``--azblob.*``
===============================================  =========================================================

Parameters are spelled with ``-`` or ``_`` in any case. ``+`` stands for itself, for secret keys contain it. What cannot be
honoured is refused, never ignored; no message repeats a URL, which may hold secrets.

Options of the clouds: flags, and parameters of storage URLs.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_type_hints
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec
from msgspec import Struct, structs

from tikv_br.environment import is_installed, missing_package
from tikv_br.errors import StorageDenied, UsageError
from tikv_br.resume_options import MayChange
from tikv_br.storage import outage
from tikv_br.storage.crypter import Crypter, SecretText

DEFAULT_REGION = "us-east-1"
NO_TEXT = "the storage URL contains bytes that are not UTF-8"
_ENCRYPTIONS = ("", "AES256", "aws:kms", "aws:kms:dsse")
_TRUE = frozenset({"1", "t", "true"})
_FALSE = frozenset({"0", "f", "false"})
VIRTUAL_HOST_PROVIDERS = frozenset({"alibaba", "netease"})
"""Providers that know no path-style requests; the Go tool's list."""


class S3Options(Struct, frozen=True, eq=False):
    """Options of S3: the ``--s3.*`` flags and the URL's parameters. ``""`` = not specified."""

    endpoint: str = ""
    """``http://`` or ``https://`` URL; ``""`` = Amazon's of the region."""
    region: str = ""
    storage_class: MayChange[str] = ""
    sse: MayChange[str] = ""
    sse_kms_key_id: MayChange[str] = ""
    provider: str = ""
    ca: MayChange[str] = ""
    """Path of a PEM file of authorities to trust besides the system's, wherever a task runs; only a flag, for it is of the machine."""
    force_path_style: MayChange[bool | None] = None
    """Bucket in the path, not in the host name; ``None`` = yes, but for `VIRTUAL_HOST_PROVIDERS`."""
    patience: MayChange[float] = outage.PATIENCE_SECONDS
    """Maximum seconds of an outage to wait, at any cloud: see `StorageLocation.patience`. Only a flag, not part of the URL, nor compared."""
    access_key: MayChange[SecretText] = msgspec.field(default_factory=SecretText)
    secret_access_key: MayChange[SecretText] = msgspec.field(default_factory=SecretText)
    session_token: MayChange[SecretText] = msgspec.field(default_factory=SecretText)

    def __eq__(self, other: object) -> bool:
        return type(other) is S3Options and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return structs.astuple(structs.replace(self, patience=0.0))

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


class AzureOptions(Struct, frozen=True):
    """Options of Azure Blob Storage: the ``--azblob.*`` flags and the URL's parameters. ``""`` = not specified."""

    endpoint: str = ""
    """``http://`` or ``https://`` URL of the account, without the container; ``""`` = Azure's of the account."""
    account_name: str = ""
    access_tier: MayChange[str] = ""
    account_key: MayChange[SecretText] = msgspec.field(default_factory=SecretText)
    sas_token: MayChange[SecretText] = msgspec.field(default_factory=SecretText)

    @property
    def storage_class(self) -> str:
        """Storage class of new objects."""
        return self.access_tier

    @property
    def server(self) -> str:
        """The endpoint, or what distinguishes it from others."""
        return self.endpoint or f"azure:{self.account_name}"


class GcsOptions(Struct, frozen=True):
    """Options of Google Cloud Storage: the ``--gcs.*`` flags and the URL's parameters. ``""`` = not specified."""

    endpoint: str = ""
    """``http://`` or ``https://`` URL; ``""`` = Google's."""
    storage_class: MayChange[str] = ""
    credentials_file: MayChange[str] = ""
    """Path of a service account's key on each machine that runs tasks; no secret itself."""

    @property
    def server(self) -> str:
        """The endpoint, or what distinguishes it from others."""
        return self.endpoint or "gcs"


CloudOptions: TypeAlias = S3Options | AzureOptions | GcsOptions


class CloudFlags(msgspec.Struct, frozen=True):
    """Flags of all clouds; a URL's parameters override them."""

    s3: S3Options = msgspec.field(default_factory=S3Options)
    azure: AzureOptions = msgspec.field(default_factory=AzureOptions)
    gcs: GcsOptions = msgspec.field(default_factory=GcsOptions)


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


_READERS: dict[object, Callable[[str, str], object]] = {
    str: lambda _name, value: value,
    bool | None: _flag,
    SecretText: lambda _name, value: SecretText(value),
}
"""Readers of parameters by the types of the fields that they fill."""
_OF_MACHINE = {"ca", "credentials_file"}
"""Paths on the machine of a task, which no URL shows."""


def public_parameters(options: CloudOptions) -> dict[str, str]:
    """The parameters without secrets that are set, in the order of the fields."""
    values = {name: getattr(options, name) for name in _fields(type(options)) if name not in _OF_MACHINE}
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return {name.replace("_", "-"): text for name, text in texts.items() if text and isinstance(text, str)}


@functools.cache
def _fields(kind: type[CloudOptions]) -> dict[str, object]:
    """Names and types of the fields that parameters fill."""
    return {name: of for name, of in get_type_hints(kind).items() if of in _READERS and name != "ca"}


def expand_home(path: str) -> str:
    """A path in which ``~`` is the home directory; unchanged for a user without one."""
    return os.path.expanduser(path)  # noqa: PTH111  # `Path.expanduser` raises an error for such users


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


_BUCKET_MIN, _BUCKET_MAX = 3, 255
"""Characters of a bucket's name; S3 allows 63 for new ones, 255 for those from before 2018 in us-east-1."""
_KINDS = "Use local://, file://, s3://, gcs:// or azure://."
Scheme = Literal["local", "s3", "azure", "gcs"]


@dataclass(frozen=True, slots=True, repr=False)
class StorageLocation:
    """A place for objects. Travels to tasks by pickle, secrets included; shows itself without them."""

    scheme: Scheme
    path: str
    """Local: an absolute directory. Clouds: the prefix, no slash at either end, possibly ``""``."""
    bucket: str = ""
    """Bucket; in Azure the container."""
    s3: S3Options = field(default_factory=S3Options)
    crypter: Crypter = field(default_factory=Crypter)
    """Encryption of the backups there; not part of the URL."""
    azure: AzureOptions = field(default_factory=AzureOptions)
    gcs: GcsOptions = field(default_factory=GcsOptions)
    anchor: str = field(default="", compare=False)
    """Local: the directory that this one was derived from by `child`; between them no symbolic link is followed. ``""`` = itself."""

    @property
    def is_cloud(self) -> bool:
        """Return whether the objects are in a bucket, accessed over the network."""
        return self.scheme != "local"

    @property
    def patience(self) -> float:
        """Maximum seconds of an outage to wait."""
        return self.s3.patience

    @property
    def options(self) -> CloudOptions:
        """The options of its cloud."""
        match self.scheme:
            case "azure":
                return self.azure
            case "gcs":
                return self.gcs
            case _:
                return self.s3

    @property
    def has_secrets(self) -> bool:
        secrets = (self.s3.access_key, self.azure.account_key, self.azure.sas_token)
        return any(map(bool, secrets))

    @property
    def health_key(self) -> outage.Key:
        """Key of the location in `tikv_br.storage.outage`."""
        return self.options.server, self.bucket

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the information whether the place has answered, so that a task trusts an address that its driver has used."""
        answered = self.is_cloud and outage.health_of(self.health_key).has_answered
        rebuild = _answered_location if answered else StorageLocation
        return rebuild, (self.scheme, self.path, self.bucket, self.s3, self.crypter, self.azure, self.gcs, self.anchor)

    def child(self, name: str) -> StorageLocation:
        """The place ``name`` below this one."""
        base = self.path.rstrip("/")
        if self.scheme != "local":
            return dataclasses.replace(self, path=f"{base}/{name}" if base else name)
        return dataclasses.replace(self, path=f"{base}/{name}", anchor=self.anchor or self.path)

    def redacted(self) -> str:
        """A URL of this place without credentials; `parse` reads it."""
        if self.scheme == "local":
            return f"local://{quote(self.path)}"
        public = public_parameters(self.options)
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in public.items())
        return f"{self.scheme}://{self.bucket}/{quote(self.path)}".rstrip("/") + (f"?{query}" if query else "")

    def __str__(self) -> str:
        return self.redacted()

    def __repr__(self) -> str:
        return f"StorageLocation({self.redacted()!r})"


def _answered_location(
    scheme: Scheme,
    path: str,
    bucket: str,
    s3: S3Options,
    crypter: Crypter,
    azure: AzureOptions,
    gcs: GcsOptions,
    anchor: str,
) -> StorageLocation:
    location = StorageLocation(scheme, path, bucket, s3, crypter, azure, gcs, anchor)
    outage.health_of(location.health_key).has_answered = True
    return location


def parse(url: str, flags: CloudFlags | None = None) -> StorageLocation:
    """Read a storage URL; of the ``flags`` only its cloud's are used. Raises `UsageError`."""
    clouds = flags or CloudFlags()
    if not url:
        raise UsageError(
            "no storage was passed", hint="Pass --storage with a directory, or an s3://, gcs:// or azure:// URL."
        )
    if re.search(r"[\x00-\x1f\x7f]", url):
        raise UsageError("the storage URL contains a control character")
    if any("\ud800" <= sign <= "\udfff" for sign in url):  # bytes of an argument that are no text
        raise UsageError(NO_TEXT, hint="Rename the directory, or pass a symbolic link to it.")
    if (path := expand_home(url)).startswith("/"):
        return _local(path)
    parts = _split(url)
    match parts.scheme:
        case "local" | "file":
            return _local_url(parts)
        case "s3":
            return _s3(parts, clouds.s3)
        case "azure" | "azblob":
            return _azure(parts, clouds)
        case "gcs" | "gs":
            return _gcs(parts, clouds)
        case "hdfs":
            text = "storage of kind 'hdfs' is not supported: HDFS is out of scope"
            raise UsageError(text, hint=f"{_KINDS} Or mount HDFS as a directory.")
        case other:
            raise UsageError(f"storage of kind {other!r} is not supported", hint=_KINDS)


def _split(url: str) -> SplitResult:
    if "://" not in url:
        kinds = "/path, local:///path, s3://bucket/prefix, gcs://bucket/prefix or azure://container/prefix"
        is_path = url and not set(url) & set(":@?")
        raise UsageError(
            f"the storage {url!r} is neither a URL nor an absolute path"
            if is_path
            else "the storage is neither a URL nor an absolute path",
            hint=f"Pass {Path(url).absolute()} if you mean that directory, or {kinds}."
            if is_path
            else f"Pass {kinds}.",
        )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise UsageError("the storage URL does not parse") from None
    if parts.fragment:
        raise UsageError("the storage URL contains a '#'", hint="Write it as %23.")
    return parts


def _local_url(parts: SplitResult) -> StorageLocation:
    home = "~" if parts.netloc == "~" else ""  # no shell expands it behind the scheme
    if parts.netloc not in {"", "localhost", home}:
        raise UsageError(
            f"{parts.scheme}:// requires an absolute path", hint=f"Write {parts.scheme}:///path, with three slashes."
        )
    if parts.query:
        raise UsageError(f"{parts.scheme}:// does not accept parameters", hint="Write a '?' in a path as %3F.")
    return _local(expand_home(home + decoded(parts.path)))


def _local(path: str) -> StorageLocation:
    if not path.startswith("/") or "\0" in path:
        raise UsageError("local storage requires an absolute path")
    return StorageLocation("local", "/" + os.path.normpath(path).lstrip("/"))


def _s3(parts: SplitResult, flags: S3Options) -> StorageLocation:
    _check_bucket(parts.netloc)
    options = structs.replace(flags, **read_parameters(parts.query, S3Options))
    if not options.endpoint and (configured := aws_endpoint()):
        check_endpoint(configured, "configured S3")
        options = structs.replace(options, endpoint=configured)
    check_s3(options)
    return StorageLocation(
        "s3", _prefix(parts), parts.netloc, structs.replace(options, endpoint=options.endpoint.rstrip("/"))
    )


def _refuse_emulator(variable: str, example: str) -> None:
    """Other clients would use an emulator, and no URL or flag names a server."""
    if os.environ.get(variable, "").lower() not in {"", "0", "false"}:
        raise UsageError(
            f"{variable} is set, which tikv-br does not follow, and no endpoint was passed",
            hint=f"Pass the emulator with endpoint={example} in the URL, or unset {variable}.",
        )


def _prefix(parts: SplitResult) -> str:
    prefix = decoded(parts.path).strip("/")
    if prefix and any(segment in {"", ".", ".."} for segment in prefix.split("/")):
        raise UsageError(f"the prefix of an {parts.scheme}:// URL must not contain '//', '.' or '..' as a segment")
    return prefix


def _azure(parts: SplitResult, flags: CloudFlags) -> StorageLocation:
    if not re.fullmatch(r"[a-z0-9](-?[a-z0-9]){2,62}|\$root", parts.netloc):
        raise UsageError(
            f"an {parts.scheme}:// URL starts with the name of a container: 3 to 63 lower-case letters, digits and single '-'",
            hint="Write azure://container/prefix; account and credentials are parameters or flags.",
        )
    said = read_parameters(parts.query, AzureOptions)
    before = flags.azure
    if said.get("sas_token") or said.get("account_key"):
        before = structs.replace(before, sas_token=SecretText(), account_key=SecretText())
    options = structs.replace(before, **said)
    if not options.endpoint:
        _refuse_emulator("AZURE_STORAGE_USE_EMULATOR", "http://127.0.0.1:10000/devstoreaccount1")
    check_endpoint(options.endpoint, "Azure", has_path=True)
    if options.account_name and not re.fullmatch(r"[a-z0-9]{3,24}", options.account_name):
        raise UsageError("azblob.account-name must have 3 to 24 lower-case letters and digits")
    if options.account_key and not is_base64(options.account_key):
        raise UsageError(
            "the Azure account key of the URL or flag is not base64", hint="Copy key1 or key2 of the storage account."
        )
    if options.account_key and options.sas_token:
        raise UsageError("the URL must have one of (account-key, sas-token), not both")
    options = structs.replace(
        options,
        endpoint=options.endpoint.rstrip("/"),
        sas_token=SecretText(options.sas_token.reveal().removeprefix("?")),
    )
    # Of S3's flags only the patience counts, so that equal places are equal.
    return StorageLocation("azure", _prefix(parts), parts.netloc, S3Options(patience=flags.s3.patience), azure=options)


def _gcs(parts: SplitResult, flags: CloudFlags) -> StorageLocation:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", parts.netloc) or ".." in parts.netloc:
        raise UsageError(
            f"a {parts.scheme}:// URL starts with the name of a bucket: lower-case letters, digits, '.', '-' and '_'",
            hint="Write gcs://bucket/prefix; endpoint and credentials are parameters or flags.",
        )
    options = structs.replace(flags.gcs, **read_parameters(parts.query, GcsOptions))
    if not options.endpoint:
        _refuse_emulator("STORAGE_EMULATOR_HOST", "http://127.0.0.1:4443")
    # The Go tool's endpoint is for the JSON API.
    endpoint = options.endpoint.rstrip("/").removesuffix("/storage/v1")
    check_endpoint(endpoint, "GCS")
    options = structs.replace(options, endpoint=endpoint)
    return StorageLocation("gcs", _prefix(parts), parts.netloc, S3Options(patience=flags.s3.patience), gcs=options)


def is_base64(secret: SecretText) -> bool:
    """Return whether a secret is base64, as keys of Azure accounts are."""
    try:
        return bool(base64.b64decode(secret.reveal(), validate=True))
    except (binascii.Error, ValueError):
        return False


def _check_bucket(name: str) -> None:
    """Refuse names that no S3 server accepts for a bucket.

    Capitals and underscores pass: buckets from before 2018 in us-east-1 have them, and some servers still
    allow them. The server decides.
    """
    hint = "Write s3://bucket/prefix; endpoint and credentials are parameters or flags."
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(
            "an s3:// URL starts with the name of a bucket: letters, digits, '.', '-' and '_', and nothing else before "
            "the next slash",
            hint=hint,
        )
    if not _BUCKET_MIN <= len(name) <= _BUCKET_MAX:
        limits = f"{_BUCKET_MIN} to {_BUCKET_MAX}"
        raise UsageError(f"the bucket name {name!r} has {len(name)} characters; S3 allows {limits}", hint=hint)
    if ".." in name or name.endswith("."):
        raise UsageError(f"the bucket name {name!r} has an empty part between dots", hint=hint)
    if re.fullmatch(r"\d+(\.\d+){3}", name):
        raise UsageError(
            f"the bucket name {name!r} is an IP address", hint="Pass the server with --s3.endpoint or endpoint=…"
        )
