"""Encryption of backups at rest: AES in counter mode, as stores and the Go TiKV-BR do it.

A file is the ciphertext of its bytes, of the same length, under a 16-byte initialization vector (IV) that is recorded beside
it. Counter mode decrypts from any offset, and hides nothing but the content: who can write to the storage can alter a file
unseen by the cipher; the recorded hashes are what finds that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from tikv_br.errors import UsageError
from tikv_br.storage.secret import SecretText

PLAINTEXT = "plaintext"
KEY_SIZES = {"aes128-ctr": 16, "aes192-ctr": 24, "aes256-ctr": 32}
"""Bytes of the key by method."""
METHODS = (PLAINTEXT, *KEY_SIZES)
IV_SIZE = 16

_BLOCK = 16
_COUNTERS = 1 << 128

Buffer: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True)
class Crypter:
    """A method and its key. Travels to tasks by pickle, and never shows the key."""

    method: str = PLAINTEXT
    """One of `METHODS`."""
    key: SecretText = field(default_factory=SecretText)
    """Hexadecimal; empty for `PLAINTEXT`."""

    @classmethod
    def of(cls, method: str, key: SecretText) -> Crypter:
        """Read what a user said; without a ``method``, the length of the key tells it.

        Raises `UsageError`, which never repeats the key.
        """
        method = method.lower()
        if method and method not in METHODS:
            raise UsageError(f"--crypter.method {method!r}: one of {', '.join(METHODS)}")
        if method == PLAINTEXT or not (method or key):
            return cls()
        size = _key_size(key)
        method = method or next((known for known, wanted in KEY_SIZES.items() if wanted == size), "")
        if not method:
            raise UsageError(f"the encryption key has {size} bytes: AES takes 16, 24 or 32", hint=_KEY_HINT)
        if size != KEY_SIZES[method]:
            raise UsageError(f"the encryption key has {size} bytes, {method} takes {KEY_SIZES[method]}", hint=_KEY_HINT)
        return cls(method, key)

    @property
    def encrypts(self) -> bool:
        """Whether there is anything to encrypt or decrypt."""
        return self.method != PLAINTEXT

    @property
    def key_bytes(self) -> bytes:
        """The key itself, for where it leaves the process."""
        return bytes.fromhex(self.key.reveal())

    def stream(self, iv: bytes, offset: int = 0) -> Callable[[Buffer], bytes]:
        """A function that encrypts, or decrypts, which is the same, the bytes of a file from ``offset`` on, piece by piece."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        blocks, skipped = divmod(offset, _BLOCK)
        counter = (int.from_bytes(iv, "big") + blocks) % _COUNTERS
        context = Cipher(algorithms.AES(self.key_bytes), modes.CTR(counter.to_bytes(IV_SIZE, "big"))).encryptor()
        context.update(bytes(skipped))
        return context.update

    def mac(self, purpose: str, data: bytes) -> bytes:
        """HMAC-SHA256 under the key. It tells nothing of the key, and each purpose has values of its own."""
        return hmac.new(self.key_bytes, f"tikv-br {purpose}\0".encode() + data, hashlib.sha256).digest()


PLAIN = Crypter()
"""No encryption."""


def new_iv() -> bytes:
    """An IV that no other file has."""
    return secrets.token_bytes(IV_SIZE)


_KEY_HINT = "Write it as 32, 48 or 64 hexadecimal digits, for instance from `openssl rand -hex 32`."


def _key_size(key: SecretText) -> int:
    """Bytes of a key."""
    if not key:
        raise UsageError("encryption is asked for, but there is no key", hint="Say --crypter.key-file.")
    try:
        return len(bytes.fromhex(key.reveal()))
    except ValueError:
        raise UsageError("the encryption key is not hexadecimal", hint=_KEY_HINT) from None
