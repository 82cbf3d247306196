"""Records in a storage, encrypted if the backup is."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
from dataclasses import replace
from typing import TypeVar

from tikv_br.backupset import layout
from tikv_br.errors import BackupDamaged, BackupUnsupported, CrypterMismatch, StorageObjectMissing
from tikv_br.records import dump, load
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import IV_SIZE, KEY_SIZES, Crypter
from tikv_br.storage.open import open_store

T = TypeVar("T")

_MARK = b'{"encryption": '
"""The first bytes of a sealed record, and of no other."""
_KEY_HINT = "Pass --crypter.key-file with the key that the backup was encrypted with."


def write_record(store: ObjectStore, name: str, record: object) -> None:
    """Write a dataclass instance as a sealed object, encrypted where the store's place is. Raises `StorageError`."""
    store.put(name, seal(dump(record), store.location.crypter))


def read_record(store: ObjectStore, kind: type[T], name: str) -> T:
    """Read what `write_record` wrote. Raises `BackupDamaged`, `BackupUnsupported`, `CrypterMismatch`, `StorageError`."""
    return load(kind, unseal(store.get(name), store.location.crypter, name), name)


_ENVELOPE_VERSION = 1


def seal(record: bytes, crypter: Crypter) -> bytes:
    """The object's bytes for a record: the record itself, where nothing is encrypted."""
    if not crypter.encrypts:
        return record
    iv = crypter.mac("record", record)[:IV_SIZE]
    document = {
        "encryption": crypter.method,
        "format_version": _ENVELOPE_VERSION,
        "key_check": _key_check(crypter, iv).hex(),
        "iv": iv.hex(),
        "ciphertext": base64.b64encode(crypter.stream(iv)(record)).decode(),
    }
    return json.dumps(document).encode()


def unseal(data: bytes, crypter: Crypter, name: str) -> bytes:
    """The record in object ``name``. Raises `CrypterMismatch` for another key or method, `BackupDamaged`."""
    if not data:
        raise BackupDamaged(f"{name} is empty")
    if not data.startswith(_MARK):
        if crypter.encrypts:
            raise _not_encrypted(name)
        return data
    version, method, key_check, iv, ciphertext = _parse_encrypted_record(data, name)
    crypter = key_of(data, crypter, name) or crypter
    if crypter.method != method:
        problem = f"the key is for {crypter.method}" if crypter.encrypts else "no key was passed"
        raise CrypterMismatch(f"{name} is encrypted with {method}, but {problem}", hint=_KEY_HINT)
    record = crypter.stream(iv)(ciphertext)
    if crypter.mac("record", record)[:IV_SIZE] != iv:
        if version > _ENVELOPE_VERSION:
            raise BackupUnsupported(f"{name} is encrypted in a newer format", hint="Use a newer tikv-br.")
        if not hmac.compare_digest(key_check, _key_check(crypter, iv)):
            raise CrypterMismatch(f"{name} is encrypted with another key", hint=_KEY_HINT)
        raise BackupDamaged(f"{name} is damaged: its decrypted content does not match its checksum")
    if seal(record, crypter) != data:  # the same content gives the same bytes
        raise BackupDamaged(f"{name} is damaged: the fields around its ciphertext were changed")
    return record


def key_of(data: bytes, crypter: Crypter, name: str) -> Crypter | None:
    """The one of a crypter's keys that the record was sealed with; None if it is none of them. Raises `BackupDamaged`."""
    if not data.startswith(_MARK):
        return None
    _, method, key_check, iv, _ = _parse_encrypted_record(data, name)
    mine = (each for each in crypter.each if each.method == method)
    return next((each for each in mine if hmac.compare_digest(key_check, _key_check(each, iv))), None)


def with_key_of(store: ObjectStore, name: str) -> ObjectStore:
    """The store with the one of its keys that the record ``name`` was sealed with; with the first if it is none of them, or missing.

    Raises `BackupDamaged`, `StorageError`.
    """
    crypter = store.location.crypter
    if not crypter.others:
        return store
    with contextlib.suppress(StorageObjectMissing):
        crypter = key_of(store.get(name), crypter, name) or crypter
    return with_key(store, crypter)


def with_key(store: ObjectStore, crypter: Crypter) -> ObjectStore:
    """The store with this one of its keys first; the others stay, for backups that this one continues."""
    others = tuple(each for each in store.location.crypter.each if each != crypter.alone)
    return open_store(replace(store.location, crypter=replace(crypter, others=others)))


def seal_meta(data: bytes, crypter: Crypter) -> bytes:
    """`backupmeta` as the Go tool encrypts it."""
    if not crypter.encrypts:
        return data
    iv = crypter.mac("backupmeta", data)[:IV_SIZE]
    return iv + crypter.stream(iv)(data)


def unseal_meta(data: bytes, crypter: Crypter) -> bytes:
    """`backupmeta` decrypted with this key; a wrong key gives bytes that do not parse."""
    return crypter.stream(data[:IV_SIZE])(data[IV_SIZE:]) if crypter.encrypts and len(data) > IV_SIZE else data


def meta_mismatch(crypter: Crypter, *, readable_as_it_is: bool) -> CrypterMismatch:
    """Why `backupmeta` does not read with a key, or without one."""
    if readable_as_it_is:
        return _not_encrypted(layout.META)
    if crypter.encrypts:
        return CrypterMismatch(
            f"{layout.META} cannot be read with this key and {crypter.method}: wrong key, or not a backup",
            hint=_KEY_HINT,
        )
    return CrypterMismatch(f"{layout.META} is encrypted, or is not a backup", hint=_KEY_HINT)


def _not_encrypted(name: str) -> CrypterMismatch:
    return CrypterMismatch(
        f"{name} is not encrypted, but a key was passed",
        hint="If this is the right backup, leave out --crypter.*, or pass --crypter.method plaintext.",
    )


def _key_check(crypter: Crypter, iv: bytes) -> bytes:
    return crypter.mac("key check", iv)


def _parse_encrypted_record(data: bytes, name: str) -> tuple[int, str, bytes, bytes, bytes]:
    """Format version, method, key check, IV and ciphertext of a sealed record. Raises `BackupDamaged`."""
    try:
        document = json.loads(data)
        version, method = int(document["format_version"]), str(document["encryption"])
        key_check, iv = bytes.fromhex(document["key_check"]), bytes.fromhex(document["iv"])
        ciphertext = base64.b64decode(document["ciphertext"], validate=True)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise BackupDamaged(f"{name} is damaged: it is not a valid encrypted record") from None
    if len(iv) != IV_SIZE or method not in KEY_SIZES:
        raise BackupDamaged(f"{name} is damaged: its encryption method is unknown")
    return version, method, key_check, iv, ciphertext
