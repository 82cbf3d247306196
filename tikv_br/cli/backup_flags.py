"""Flags of storage and backups, and how a backup is chosen."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import typer

from tikv_br.cli import kinds, shared
from tikv_br.cli.command import REQUIRED, Flags, argument, build, flag, flags_of, given
from tikv_br.errors import TikvBrError, UsageError
from tikv_br.storage.crypter import Crypter, SecretText
from tikv_br.storage.url import AzureOptions, CloudFlags, GcsOptions, S3Options, StorageLocation, parse

if TYPE_CHECKING:
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.index import Index, ListedBackup

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
    credentials_file: str = flag(
        "",
        "Key file of a service account, on each machine that runs tasks (default: the application default credentials).",
        metavar="FILE",
    )


class S3Flags(Flags, shared=True, prefix="s3."):
    """Access to S3, and to the other clouds."""

    # First, as `S3Options` has other names for them.
    gcs: GcsFlags = flags_of(GcsFlags)
    azblob: AzblobFlags = flags_of(AzblobFlags)

    endpoint: str = flag("", "S3 endpoint (default: AWS).", metavar="URL")
    region: str = flag("", "S3 region.", metavar="NAME")
    storage_class: str = flag("", "S3 storage class of new objects.", metavar="NAME")
    sse: str = flag("", "Server-side encryption: AES256, aws:kms or aws:kms:dsse.", metavar="NAME")
    sse_kms_key_id: str = flag("", "KMS key ID for --s3.sse aws:kms.", metavar="ID")
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
        kind=kinds.TIME,
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

    s3: S3Flags = flags_of(S3Flags)
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
    key_file: list[str] | None = flag(
        None,
        "File with the encryption key in hexadecimal. Repeat it for older keys: each backup is read with its own, new ones get the first.",
        metavar="FILE",
    )
    allow_unproven: bool = flag(
        False,
        "Also read an encrypted backup without a manifest, as of the Go TiKV-BR: nothing proves that it is unchanged.",
    )

    def locate(self, url: str) -> StorageLocation:
        """As `S3Flags.locate`, with the encryption key. Raises `UsageError`."""
        first, *older = self.key_file or [""]
        keys = [shared.secret_of("--crypter.key", self.key, first)]
        keys += [shared.secret_of("--crypter.key", "", each) for each in older]
        return replace(self.s3.locate(url), crypter=Crypter.of(self.method, *keys, unproven=self.allow_unproven))


class BackupFlags(shared.CommandFlags):
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


def choose(
    context: typer.Context,
    storage_flags: StorageFlags,
    name: str,
    chosen: str,
    root: str,
    until_ts: Callable[[], int] = lambda: 0,
) -> StorageLocation:
    """The place of a backup: the URL `chosen`, or what `root`, the value of the parameter `name`, and the id ``chosen`` say.

    ``newest`` is the newest that was complete at ``until_ts()``, if that is not 0. A URL takes precedence over the environment. Raises `UsageError`, and as `Index.find`.
    """
    if _is_url(context, name, chosen):
        return storage_flags.locate(chosen)
    _check_root(context, name, root)
    location = storage_flags.locate(root)
    if not chosen:
        return location
    from tikv_br.backupset.index import NEWEST, Index
    from tikv_br.storage.open import open_store

    return Index(open_store(location)).location_of(chosen, until_ts() if chosen == NEWEST else 0)


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


def chosen_backup(name: str, *, many: bool = False) -> Any:  # noqa: ANN401 - as `argument`
    """The declaration of the backup, or of ``many``, as an argument; the flag `name` may have its URL or a root's URL instead."""
    text = f"Backup: its URL, or the id or newest of those below {name} (default: the backup at {name} itself)."
    if many:
        return argument(None, "[URL|ID|newest]...", text, autocompletion=complete_id)
    return argument("", "[URL|ID|newest]", text, autocompletion=complete_id)


CHOSEN_STORAGE = partial(
    storage, f"URL of one backup or, with ID or newest, parent URL of the backups: {URLS}", default=""
)


class ChosenBackupFlags(IndexFlags):
    """The backup that a command reads: by its URL, or by the root and its id or ``newest``."""

    chosen: str = chosen_backup("--storage")
    storage: str = CHOSEN_STORAGE()

    def choose(self, context: typer.Context, until_ts: Callable[[], int] = lambda: 0) -> StorageLocation:
        """The place of the backup. Raises as `choose`."""
        return choose(context, self.storage_flags, "storage", self.chosen, self.storage, until_ts)

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

    def backup(self, context: typer.Context, *, rows: bool = False) -> BackupSet:
        """The backup, opened; of any key mode. With ``rows`` it is opened as strictly as for a restore, else to be described."""
        from tikv_br.backupset.backup_set import BackupSet
        from tikv_br.storage.open import open_store

        return (BackupSet.open if rows else BackupSet.open_any)(open_store(self.choose(context)), key_mode=None)
