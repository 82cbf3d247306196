"""The records of an encrypted backup: they hold keys of the user's data, and are encrypted as the files are.

Our own records say in clear which method was used, and carry a value by which a wrong key is told from damage before any
file is read. `backupmeta` has the Go tool's form, which says nothing: 16 bytes of IV, then the ciphertext.

IVs come from the content under the key: the same content gives the same bytes, and an altered record is noticed.
"""

from __future__ import annotations

import base64
import hmac
import json
from typing import TypeVar

from tikv_br.backupset import layout, sealed_json
from tikv_br.errors import BackupDamaged, BackupUnsupported, CrypterMismatch
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import IV_SIZE, KEY_SIZES, Crypter

T = TypeVar("T")
FORMAT_VERSION = 1
_MARK = b'{"encryption": '
"""How a sealed record begins, and no other does."""
_SAY_KEY = "Say --crypter.key-file, with the key that the backup was made with."


def write_record(store: ObjectStore, name: str, record: object) -> None:
    """Write a dataclass instance as a sealed object, encrypted where the store's place is. Raises `StorageError`."""
    store.put(name, seal(sealed_json.dump(record), store.location.crypter))


def read_record(store: ObjectStore, kind: type[T], name: str) -> T:
    """Read what `write_record` wrote. Raises `BackupDamaged`, `BackupUnsupported`, `CrypterMismatch`, `StorageError`."""
    return sealed_json.load(kind, unseal(store.get(name), store.location.crypter, name), name)


def seal(record: bytes, crypter: Crypter) -> bytes:
    """The object's bytes for a record: the record itself, where nothing is encrypted."""
    if not crypter.encrypts:
        return record
    iv = crypter.mac("record", record)[:IV_SIZE]
    document = {
        "encryption": crypter.method,
        "format_version": FORMAT_VERSION,
        "key_check": _key_check(crypter, iv).hex(),
        "iv": iv.hex(),
        "ciphertext": base64.b64encode(crypter.stream(iv)(record)).decode(),
    }
    return json.dumps(document).encode()


def unseal(data: bytes, crypter: Crypter, name: str) -> bytes:
    """The record in object ``name``. Raises `CrypterMismatch` for another key or method, `BackupDamaged`."""
    if not data.startswith(_MARK):
        if crypter.encrypts:
            raise _not_encrypted(name)
        return data
    version, method, key_check, iv, ciphertext = _opened(data, name)
    if crypter.method != method:
        said = f"and the key is for {crypter.method}" if crypter.encrypts else "and there is no key"
        raise CrypterMismatch(f"{name} is encrypted with {method}, {said}", hint=_SAY_KEY)
    record = crypter.stream(iv)(ciphertext)
    if crypter.mac("record", record)[:IV_SIZE] != iv:
        if version > FORMAT_VERSION:
            raise BackupUnsupported(f"{name} is encrypted in a newer form", hint="Use a newer tikv-br.")
        if not hmac.compare_digest(key_check, _key_check(crypter, iv)):
            raise CrypterMismatch(f"{name} is encrypted with another key", hint=_SAY_KEY)
        raise BackupDamaged(f"{name} is damaged: it does not decrypt to what was written")
    if seal(record, crypter) != data:  # the same content gives the same bytes
        raise BackupDamaged(f"{name} is damaged: around its ciphertext it is not as written")
    return record


def seal_meta(data: bytes, crypter: Crypter) -> bytes:
    """`backupmeta` as the Go tool encrypts it."""
    if not crypter.encrypts:
        return data
    iv = crypter.mac("backupmeta", data)[:IV_SIZE]
    return iv + crypter.stream(iv)(data)


def unseal_meta(data: bytes, crypter: Crypter) -> bytes:
    """What `backupmeta` may be with this key: whether it is, only its form can tell."""
    return crypter.stream(data[:IV_SIZE])(data[IV_SIZE:]) if crypter.encrypts and len(data) > IV_SIZE else data


def meta_mismatch(crypter: Crypter, *, readable_as_it_is: bool) -> CrypterMismatch:
    """Why `backupmeta` does not read with a key, or without one."""
    if readable_as_it_is:
        return _not_encrypted(layout.META)
    if crypter.encrypts:
        return CrypterMismatch(
            f"{layout.META} does not read with this key and {crypter.method}: another key, or not of a backup",
            hint=_SAY_KEY,
        )
    return CrypterMismatch(f"{layout.META} is encrypted, or not of a backup at all", hint=_SAY_KEY)


def _not_encrypted(name: str) -> CrypterMismatch:
    return CrypterMismatch(
        f"{name} is not encrypted, and a key was given",
        hint="Leave out --crypter.*, or say --crypter.method plaintext, if this is the backup that you mean.",
    )


def _key_check(crypter: Crypter, iv: bytes) -> bytes:
    return crypter.mac("key check", iv)


def _opened(data: bytes, name: str) -> tuple[int, str, bytes, bytes, bytes]:
    """Format version, method, key check, IV and ciphertext of a sealed record. Raises `BackupDamaged`."""
    try:
        document = json.loads(data)
        version, method = int(document["format_version"]), str(document["encryption"])
        key_check, iv = bytes.fromhex(document["key_check"]), bytes.fromhex(document["iv"])
        ciphertext = base64.b64decode(document["ciphertext"], validate=True)
    except (ValueError, TypeError, KeyError):
        raise BackupDamaged(f"{name} is damaged: it is no encrypted record of ours") from None
    if len(iv) != IV_SIZE or method not in KEY_SIZES:
        raise BackupDamaged(f"{name} is damaged: its method of encryption is none")
    return version, method, key_check, iv, ciphertext
