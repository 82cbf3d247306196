"""The storage flags as one location."""

from __future__ import annotations

import dataclasses
import logging
import stat
from pathlib import Path

from tikv_br.errors import UsageError
from tikv_br.storage.crypter import Crypter
from tikv_br.storage.secret import SecretText
from tikv_br.storage.url import S3Options, StorageLocation, parse

log = logging.getLogger(__name__)
_LARGEST_KEY_FILE = 4096


def storage_location(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    storage_class: str | None = None,
    sse: str | None = None,
    sse_kms_key_id: str | None = None,
    acl: str | None = None,
    provider: str | None = None,
    force_path_style: bool | None = None,
    crypter_method: str | None = None,
    crypter_key: str | None = None,
    crypter_key_file: str | None = None,
) -> StorageLocation:
    """The location of ``--storage``, ``--s3.*`` and ``--crypter.*``; what the URL says counts more. Raises `UsageError`."""
    options = S3Options(
        endpoint=endpoint or "",
        region=region or "",
        storage_class=storage_class or "",
        sse=sse or "",
        sse_kms_key_id=sse_kms_key_id or "",
        acl=acl or "",
        provider=provider or "",
        force_path_style=force_path_style,
    )
    crypter = Crypter.of(crypter_method or "", _key(crypter_key or "", crypter_key_file or ""))
    return dataclasses.replace(parse(url, options), crypter=crypter)


def _key(key: str, key_file: str) -> SecretText:
    """The key that was given, either way. Raises `UsageError`."""
    if key and key_file:
        raise UsageError(
            "the encryption key is given twice: as such and in a file",
            hint="Say one of --crypter.key and --crypter.key-file, or set one of their variables.",
        )
    return _read_key(Path(key_file)) if key_file else SecretText(key.strip())


def _read_key(path: Path) -> SecretText:
    try:
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IROTH | stat.S_IWOTH):
            log.warning("every user of this machine may read or replace %s: let it be its owner's alone", path)
        with path.open("rb") as file:
            data = file.read(_LARGEST_KEY_FILE + 1)
        text = data.decode("ascii").strip()
    except OSError as error:
        raise UsageError(f"--crypter.key-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--crypter.key-file {path} holds no hexadecimal text") from None
    if not text or len(data) > _LARGEST_KEY_FILE:
        raise UsageError(f"--crypter.key-file {path} holds no key")
    return SecretText(text)
