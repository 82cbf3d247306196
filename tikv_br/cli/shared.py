"""Flags that commands share: one name, one help text, one environment variable each; and how times, sizes and rates are written."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tikv_br.cli import log, settings
from tikv_br.cli.command import REQUIRED, FlagKind, Flags, argument, build, flag, given
from tikv_br.cli.log import LogForm, LogLevel
from tikv_br.cli.output import Output, OutputForm
from tikv_br.cluster.timestamps import parse_ts
from tikv_br.errors import TikvBrError, UsageError
from tikv_br.storage.cloud_options import AzureOptions, CloudFlags, GcsOptions, S3Options
from tikv_br.storage.crypter import Crypter, SecretText, read_secret
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.tasks.session import SparkSettings

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.index import Index, ListedBackup
    from tikv_br.cluster.config import ClusterConfig, EtcdConfig, TlsFiles

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------------ kinds of values

MAX_DURATION = 100 * 365 * 86400.0
"""Seconds that a duration may have: what timers, timestamps and servers can still add to the present time."""
MAX_SIZE = 2**50
"""Bytes that a size may have."""
MIN_RATE, MAX_RATE = 0.001, 2.0**20
"""MiB per second that a rate limit may be. Below this a large backup would never end."""
MAX_COUNT = 10**12
"""Rows that an option may ask for."""
MAX_CONCURRENCY = 4096
MAX_BACKUPS = 100_000
"""Backups or reports that a rule may keep."""
MAX_SEED = 2**32 - 1
"""The largest timestamp of PD."""

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Read ``90s``, ``1m``, ``1h30m``, ``500ms`` or plain seconds; returns seconds. Raises `typer.BadParameter`."""
    bare = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", bare):
        seconds = float(bare)
    else:
        parts = _DURATION_PART.findall(bare)
        if not parts or "".join(number + unit for number, unit in parts) != bare:
            raise typer.BadParameter(f"{bare!r} is not a valid duration: use 90s, 5m, 1h30m or 500ms")
        seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    if seconds > MAX_DURATION:
        raise typer.BadParameter(f"{_cut(bare)} is too long: pass at most 36500d (100 years)")
    return seconds


def parse_rate_limit(text: str) -> int:
    """Read ``10MiB``, ``512KiB/s`` or a number of MiB per second; returns bytes per second, 0 only for "unlimited".

    Raises `typer.BadParameter`.
    """
    bare = text.strip().removesuffix("/s")
    match = _SIZE.fullmatch(bare)
    try:
        rate = float(match[1]) * _SIZE_UNITS[match[2].lower()] / 2**20 if match and bare[-1].isalpha() else float(bare)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a valid rate: use 10MiB, 512KiB, or MiB/s as a number") from None
    if rate != 0 and not MIN_RATE <= rate <= MAX_RATE:  # nan is outside as well
        raise typer.BadParameter(
            f"{_cut(text)} MiB/s is out of range: pass 0 (unlimited), or {MIN_RATE} to {MAX_RATE:.0f}"
        )
    return math.ceil(rate * 2**20)


def parse_size(text: str) -> int:
    """Read ``64MiB``, ``64m``, ``1GB`` or plain bytes (units are powers of 1024). Raises `typer.BadParameter`."""
    bare = text.strip()
    match = _SIZE.fullmatch(bare)
    if match is None:
        raise typer.BadParameter(f"{bare!r} is not a valid size: use 4096, 64KiB, 16MiB or 1GiB")
    size = float(match[1]) * _SIZE_UNITS[match[2].lower()]
    if size > MAX_SIZE:
        raise typer.BadParameter(f"{_cut(bare)} is too large: pass at most 1024TiB")
    return int(size)


def _cut(text: str) -> str:
    """A value as messages show it: hundreds of digits say nothing."""
    return text if len(text) <= 40 else f"{text[:40]}…"


TIME = FlagKind("DURATION", parse_duration)
SIZE = FlagKind("SIZE", parse_size)
RATE = FlagKind("RATE", parse_rate_limit)


def secret_of(name: str, value: str, file: str) -> SecretText:
    """The secret of a flag or of its ``-file`` flag, stripped; empty = neither. Raises `UsageError`."""
    if value and file:
        raise UsageError(
            f"{name} and {name}-file cannot be combined",
            hint=f"Pass {name} or {name}-file, or set one of their variables.",
        )
    return read_secret(f"{name}-file", Path(file)) if file else SecretText(value.strip())


def state_path(*parts: str) -> Path:
    """A path below tikv-br's directory in the user's state directory."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser().absolute().joinpath("tikv-br", *parts)


# -------------------------------------------------------------------------------------------------- flags of all commands


def _configures_log(setting: str) -> Callable[[typer.Context, Any], Any]:
    """A callback that changes a setting of `log.configure`."""

    def use(context: typer.Context, value: Any) -> Any:  # noqa: ANN401 - whatever the setting is
        if not context.resilient_parsing:  # set while values are only checked or completed
            log.configure(**{setting: value})
        return value

    return use


def _use_quiet(context: typer.Context, *, quiet: bool) -> bool:
    if not context.resilient_parsing:
        log.configure(quiet=quiet)
        invocation = context.find_object(settings.Invocation)
        if invocation is not None and invocation.has_secrets:  # here, as this is the last option of logging
            logger.warning(
                "a credential was passed on the command line, where `ps` and the shell history can show it: use a file or an "
                "environment variable instead"
            )
    return quiet


class CommandFlags(Flags, shared=True):
    """Base of the flags of every command."""

    output: OutputForm = flag(
        OutputForm.CONSOLE, "Output format: console (for people) or json (JSON lines, for scripts)."
    )
    config: str | None = flag(
        None,
        "Config file (TOML; default: ~/.config/tikv-br/config.toml if it exists).",
        metavar="FILE",
        is_eager=True,
        callback=settings.use_config,
    )
    log_level: LogLevel = flag(
        LogLevel.INFO, "Minimum level to log; debug adds tracebacks.", callback=_configures_log("level")
    )
    log_file: str | None = flag(
        None,
        "Append the log, with progress and errors, to this file (default: stderr).",
        metavar="FILE",
        callback=_configures_log("file"),
    )
    log_format: LogForm = flag(
        LogForm.TEXT, "Log format: text, or json (one object per line).", callback=_configures_log("form")
    )
    quiet: bool = flag(
        False,
        "Only print warnings, errors and what the command is asked for, such as rows or the plan of a dry run.",
        "--quiet",
        "-q",
        callback=_use_quiet,
    )

    @cached_property
    def out(self) -> Output:
        """Return the output that results are written to."""
        return Output(self.output)


# ----------------------------------------------------------------------------------------------- clusters, keys and tasks


def pd(text: str, default: Sequence[str] = ("127.0.0.1:2379",)) -> Any:  # noqa: ANN401 - as `flag`
    """The declaration of ``--pd`` with its help."""
    return flag(list(default), text, "--pd", "-u", shared=True, metavar="ADDRESS")


class ClusterFlags(Flags, shared=True):
    pd: list[str] = pd("PD endpoints of the cluster, comma-separated: host:port,… (may be repeated).")
    ca: str | None = flag(None, "CA certificate (PEM). Enables TLS.", metavar="FILE")
    cert: str | None = flag(None, "Client certificate for mutual TLS (PEM).", metavar="FILE")
    key: str | None = flag(None, "Private key of --cert (PEM).", metavar="FILE")
    skip_version_check: bool = flag(False, "Use stores of versions that are refused because they are known to fail.")

    def config(self) -> ClusterConfig:
        """The cluster. Raises `UsageError`."""
        from tikv_br.cluster.config import ClusterConfig

        return ClusterConfig.from_flags(
            self.pd, ca=self.ca, cert=self.cert, key=self.key, skip_version_check=self.skip_version_check
        )

    def other(self, pd: str, ca: str | None, cert: str | None, key: str | None) -> ClusterConfig:
        """Another cluster; its TLS files as in `tls`. Raises `UsageError`."""
        from tikv_br.cluster.config import ClusterConfig, parse_addresses

        return ClusterConfig(
            pd=parse_addresses(pd), tls=self.tls(ca, cert, key), skip_version_check=self.skip_version_check
        )

    def tls(self, ca: str | None, cert: str | None, key: str | None) -> TlsFiles:
        """TLS files of another server: those of this cluster unless named; none if `ca` is empty."""
        from tikv_br.cluster.config import TlsFiles

        return TlsFiles() if ca == "" else TlsFiles(ca=ca or self.ca, cert=cert or self.cert, key=key or self.key)


class EtcdFlags(Flags, shared=True):
    """The etcd that has the state of a sync or of a group of captures."""

    etcd: str = flag(
        "",
        "etcd endpoints, comma-separated: host:port,… Prefix http:// to disable TLS (default: PD's etcd, at --pd).",
        metavar="ADDRESS",
    )
    etcd_ca: str | None = flag(None, "CA certificate for --etcd (PEM; default: --ca).", metavar="FILE")
    etcd_cert: str | None = flag(None, "Client certificate for --etcd (PEM; default: --cert).", metavar="FILE")
    etcd_key: str | None = flag(None, "Private key of --etcd-cert (PEM; default: --key).", metavar="FILE")
    etcd_user: str = flag("", "User name for --etcd.", metavar="NAME")
    etcd_password: str = flag(
        "", "Password. Needs --etcd-user. Prefer the environment variable: flags are visible in `ps`.", metavar="TEXT"
    )

    def etcd_config(self, source: ClusterFlags) -> EtcdConfig:
        """The etcd of a group on this cluster. Raises `UsageError`."""
        from tikv_br.cluster.config import EtcdConfig, parse_addresses

        if bool(self.etcd_user) != bool(self.etcd_password):
            raise UsageError("pass both or none of (--etcd-user, --etcd-password)")
        endpoints = parse_addresses(self.etcd) if self.etcd else source.config().pd
        tls = source.tls("" if "http://" in self.etcd else self.etcd_ca, self.etcd_cert, self.etcd_key)
        return EtcdConfig(endpoints, tls, self.etcd_user, self.etcd_password)


KEYSPACE = partial(flag, "", "Keyspace, by id or name (API V2; default: 0).", shared=True, metavar="ID|NAME")
ALLOW_EMPTY = partial(
    flag, False, "Succeed if a requested range, keyspace or prefix has no row (default: exit code 66)."
)
ALLOW_FOLLOWERS = partial(
    flag,
    False,
    "Ingest although a follower of the cluster will miss these rows, such as TiKV-CDC or a sync of an older tikv-br (API V2; default: refuse).",
    command_line=True,
)
DRY_RUN = partial(flag, False, "Check and plan, but change nothing.")
REPORT = partial(
    flag,
    "",
    "Write a report, even if the command fails: FILE.html (with FILE.json next to it), or FILE.json alone.",
    metavar="FILE",
)
LOCK_WAIT = partial(flag, "0s", "Maximum time to wait for another run that has the lock (0 = fail at once).", kind=TIME)
RATE_LIMIT = partial(
    flag,
    "0",
    "Maximum rate per store in bytes per second, as 10MiB or 512KiB; a plain number is MiB (0 = unlimited).",
    "--ratelimit",
    kind=RATE,
    shared=True,
)
SEND_CREDENTIALS = partial(
    flag,
    True,
    "Send this process's storage credentials to the stores; otherwise they use their own.",
    "--send-credentials-to-tikv/--no-send-credentials-to-tikv",
)
VIA = partial(
    flag,
    "auto",
    "How files get to the stores: stores (each store downloads them), upload (tikv-br reads and uploads them), or auto (upload only "
    "what stores cannot read).",
)
SEED = partial(flag, 0, limits=(0, MAX_SEED))


class SparkMasterFlags(Flags, shared=True):
    spark_master: str = flag("local[*]", "URL of the Spark master: local[*], spark://…, yarn or k8s://…", metavar="URL")
    spark_conf: list[str] = flag(
        [], "Setting of Spark, such as spark.executor.memory=4g (may be repeated).", metavar="KEY=VALUE"
    )
    spark_archive: str = flag(
        "",
        "Archive with the Python environment of a cluster's workers, made by `tikv-br spark pack`: a file, or a URL that they can read.",
        metavar="FILE",
    )

    def spark_settings(self) -> SparkSettings:
        """Return the settings for starting Spark. Raises `UsageError`."""
        return SparkSettings.parse(self.spark_conf, self.spark_archive)


class SparkFlags(SparkMasterFlags, shared=True):
    executor: Literal["auto", "driver", "spark"] = flag(
        "auto",
        "Where tasks run: driver (threads of this process), spark, or auto (spark for large amounts of work, e.g. scans from 4 GiB).",
    )


class TaskFlags(SparkFlags):
    concurrency: int | None = flag(
        None,
        "Maximum number of concurrent tasks (default: depends on the executor, the CPU count and the kind of work).",
        shared=True,
        limits=(1, MAX_CONCURRENCY),
    )


# ----------------------------------------------------------------------------------------------------- storage and backups

URLS = "local:///DIR, s3://BUCKET/PREFIX?endpoint=…&region=…, gcs://BUCKET/PREFIX or azure://CONTAINER/PREFIX"
ONE_BACKUP = f"URL of one backup: {URLS}"
MANY_BACKUPS = f"Parent URL of the backups: {URLS}"


def storage(text: str, default: Any = REQUIRED) -> Any:  # noqa: ANN401 - as `flag`
    """The declaration of ``--storage`` with its help."""
    return flag(default, text, "--storage", "-s", shared=True, metavar="URL")


class AzblobFlags(Flags, shared=True, prefix="azblob."):
    endpoint: str = flag(
        "", "Azure endpoint of the account (default: https://ACCOUNT.blob.core.windows.net).", metavar="URL"
    )
    access_tier: str = flag("", "Azure access tier of new objects: Hot, Cool, Cold or Archive.", metavar="NAME")
    account_name: str = flag("", "Azure storage account (default: AZURE_STORAGE_ACCOUNT).", metavar="NAME")
    account_key: str = flag(
        "", "Azure account key. Prefer AZURE_STORAGE_KEY: flags are visible in `ps`.", metavar="BASE64"
    )


class GcsFlags(Flags, shared=True, prefix="gcs."):
    endpoint: str = flag("", "GCS endpoint (default: Google's).", metavar="URL")
    storage_class: str = flag("", "GCS storage class of new objects.", metavar="NAME")
    predefined_acl: str = flag("", "Not supported. Use IAM instead.", metavar="NAME")
    credentials_file: str = flag(
        "",
        "Key file of a service account, on each machine that runs tasks (default: the application default credentials).",
        metavar="FILE",
    )


class S3Flags(Flags, shared=True, prefix="s3."):
    """Access to S3, and to the other clouds."""

    # First, as their names are not those of `S3Options`.
    gcs: GcsFlags = field(default_factory=GcsFlags)
    azblob: AzblobFlags = field(default_factory=AzblobFlags)

    endpoint: str = flag("", "S3 endpoint (default: AWS).", metavar="URL")
    region: str = flag("", "S3 region.", metavar="NAME")
    storage_class: str = flag("", "S3 storage class of new objects.", metavar="NAME")
    sse: str = flag("", "Server-side encryption: AES256, aws:kms or aws:kms:dsse.", metavar="NAME")
    sse_kms_key_id: str = flag("", "KMS key ID for --s3.sse aws:kms.", metavar="ID")
    acl: str = flag("", "Not supported. Use bucket policies instead.", metavar="NAME")
    provider: str = flag(
        "", "S3 provider, as in the Go TiKV-BR: alibaba and netease turn path style off.", metavar="NAME"
    )
    ca: str = flag("", "Additional CA certificates to trust for S3 (PEM; default: AWS_CA_BUNDLE).", metavar="FILE")
    force_path_style: bool | None = flag(
        None,
        "Put the bucket in the path of S3 URLs instead of the host name (default: yes).",
        "--s3.force-path-style/--s3.no-force-path-style",
    )
    patience: float = flag(
        "1m",
        "How long to retry when storage in a cloud that was reachable becomes unavailable, before the command fails.",
        "--storage-patience",
        kind=TIME,
    )

    def locate(self, url: str) -> StorageLocation:
        """The location of a URL and the flags; parameters of the URL take precedence. Raises `UsageError`."""
        return parse(url, self.clouds())

    def clouds(self) -> CloudFlags:
        """The flags as options."""
        s3 = self.fill(S3Options, ca=self.ca or os.environ.get("AWS_CA_BUNDLE", ""))
        azure = self.azblob.fill(AzureOptions, account_key=SecretText(self.azblob.account_key))
        return CloudFlags(s3, azure, self.gcs.fill(GcsOptions))


class StorageFlags(Flags, shared=True, prefix="crypter."):
    """Access to S3, and encryption."""

    s3: S3Flags = field(default_factory=S3Flags)
    method: str = flag(
        "",
        "Encryption: plaintext, aes128-ctr, aes192-ctr or aes256-ctr (default: by the length of the key).",
        metavar="NAME",
        autocompletion=lambda: ["plaintext", "aes128-ctr", "aes192-ctr", "aes256-ctr"],
    )
    key: str = flag(
        "",
        "Encryption key in hexadecimal. Prefer --crypter.key-file or the environment variable: flags are visible in `ps`.",
        metavar="HEX",
    )
    key_file: str = flag("", "File with the encryption key in hexadecimal.", metavar="FILE")

    def locate(self, url: str) -> StorageLocation:
        """As `S3Flags.locate`, with the encryption key. Raises `UsageError`."""
        key = secret_of("--crypter.key", self.key, self.key_file)
        return replace(self.s3.locate(url), crypter=Crypter.of(self.method, key))


ALLOW_INEXACT = partial(
    flag,
    False,
    "Accept a time at which the log lacks versions, because the CDC stream was interrupted: keys that were overwritten then may get "
    "an older value, or be missing.",
)


LOG_ID = partial(flag, "default", "Name of the log archive (see `tikv-br log start --log-id`).", metavar="NAME")


class LogSourceFlags(Flags):
    log: str = flag("", f"Log archive to use with the backup: {URLS}.", metavar="URL")
    log_id: str = LOG_ID()

    def source(self, storage: StorageFlags) -> LogSource | None:
        """The log, if there is one. Raises `UsageError`."""
        if not self.log:
            return None
        from tikv_br.archive.log import LogSource

        return LogSource(storage.locate(self.log), self.log_id)


def parse_ts_or_latest(text: str, name: str) -> int:
    """As `parse_ts`; 0 = ``latest``. Raises `UsageError`."""
    return 0 if text == "latest" else parse_ts(text, name)


class BackupFlags(CommandFlags):
    storage: str = storage(ONE_BACKUP)
    storage_flags: StorageFlags

    @cached_property
    def location(self) -> StorageLocation:
        """The place of ``--storage``. Raises `UsageError`."""
        return self.storage_flags.locate(self.storage)


class IndexFlags(BackupFlags):
    storage: str = storage(MANY_BACKUPS)

    @cached_property
    def index(self) -> Index:
        """The index of the backups at the root."""
        from tikv_br.backupset.index import Index
        from tikv_br.storage.open import open_store

        return Index(open_store(self.location))


ROOTS = ("full_backup_storage", "from_backup", "base", "storage")
"""Parameters that name a backup, or the root of those below which an id is looked up; --storage has another use beside the others."""


def choose(context: typer.Context, storage_flags: StorageFlags, name: str, chosen: str, root: str) -> StorageLocation:
    """The place of a backup: the URL `chosen`, or what `root`, the value of the parameter `name`, and the id ``chosen`` say.

    A URL takes precedence over the environment. Raises `UsageError`, and as `Index.find`.
    """
    if _is_url(context, name, chosen):
        return storage_flags.locate(chosen)
    _check_root(context, name, root)
    location = storage_flags.locate(root)
    if not chosen:
        return location
    from tikv_br.backupset.index import Index
    from tikv_br.storage.open import open_store

    return Index(open_store(location)).location_of(chosen)


def _is_url(context: typer.Context, name: str, chosen: str) -> bool:
    if "/" in chosen and given(context, name):
        raise UsageError(f"URL and {_flag_of(name)} cannot be combined", hint="Pass one of them.")
    return "/" in chosen


def _check_root(context: typer.Context, name: str, root: str) -> None:
    if not root:
        raise UsageError(
            "no backup was given",
            hint=f"Pass `{context.command_path} URL`, or {_flag_of(name)} URL, if needed with an id or newest.",
        )


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def complete_id(context: typer.Context, incomplete: str) -> list[str]:
    """Complete ids of the index at the flag that names its root; errors give no suggestions."""
    storage = next(filter(None, map(context.params.get, ROOTS)), None)
    if not storage:
        return []
    with contextlib.suppress(TikvBrError, KeyError):
        flags = IndexFlags(storage=str(storage), storage_flags=build(StorageFlags, context.params))
        return sorted(found for found in flags.index.ids() if found.startswith(incomplete))
    return []


def chosen_backup(name: str) -> Any:  # noqa: ANN401 - as `argument`
    """The declaration of the backup as an argument; the flag `name` may have its URL or that of a root instead."""
    text = f"Backup: its URL, or the id or newest of those below {name} (default: the backup at {name} itself)."
    return argument("", "[URL|ID|newest]", text, autocompletion=complete_id)


CHOSEN_STORAGE = partial(
    storage, f"URL of one backup or, with ID or newest, parent URL of the backups: {URLS}", default=""
)


class ChosenBackupFlags(IndexFlags):
    """The backup that a command reads: by its URL, or by the root and its id or ``newest``."""

    chosen: str = chosen_backup("--storage")
    storage: str = CHOSEN_STORAGE()

    def choose(self, context: typer.Context) -> StorageLocation:
        """The place of the backup. Raises as `choose`."""
        return choose(context, self.storage_flags, "storage", self.chosen, self.storage)

    def find(self, context: typer.Context) -> tuple[Index, ListedBackup]:
        """The entry of the backup, and the index that has it. Raises `UsageError` and `BackupNotFound`."""
        from tikv_br.backupset.index import Index, place_of
        from tikv_br.storage.open import open_store

        if not _is_url(context, "storage", self.chosen):
            _check_root(context, "storage", self.storage)
            return self.index, self.index.find(self.chosen)
        place = place_of(self.storage_flags.locate(self.chosen))
        if place is None:
            raise UsageError(f"{self.chosen} is the root of its storage, which no index lists", hint="Check the URL.")
        index = Index(open_store(place.root))
        return index, index.find_path(place.path)

    def backup(self, context: typer.Context) -> BackupSet:
        """The backup, opened."""
        from tikv_br.backupset.backup_set import BackupSet
        from tikv_br.storage.open import open_store

        return BackupSet.open_any(open_store(self.choose(context)))
