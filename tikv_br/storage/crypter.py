"""Secrets that are never printed, and the encryption of backups at rest: AES in counter mode, as in stores and the Go TiKV-BR."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from tikv_br.errors import UsageError

log = logging.getLogger(__name__)

MASK = "***"


class SecretText:
    """A secret of the user: ``str``, ``repr`` and ``format`` show a mask, JSON refuses it, pickle carries it.

    Only `reveal` gives the text; call it where the text leaves the process, and nowhere else.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, SecretText) else NotImplemented

    def __hash__(self) -> int:
        return hash((SecretText, self._text))

    def __repr__(self) -> str:
        return f"SecretText({MASK if self._text else ''!r})"

    def __str__(self) -> str:
        return MASK if self._text else ""

    def __reduce__(self) -> tuple[type[SecretText], tuple[str]]:
        return (SecretText, (self._text,))


MAX_SECRET = 1 << 12
"""Bytes that the file of a secret may have."""


def read_secret(name: str, path: Path) -> SecretText:
    """The secret in a file, stripped; messages call the file ``name``. Raises `UsageError`."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IROTH | stat.S_IWOTH):
            log.warning("every user of this machine can read or replace %s: restrict it to its owner", path)
        with path.open("rb") as file:
            data = file.read(MAX_SECRET + 1)
        text = data.decode("utf-8").strip()
    except OSError as error:
        raise UsageError(f"{name} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{name} {path} is not a text file") from None
    if not text or len(data) > MAX_SECRET:
        raise UsageError(f"{name} {path} is empty or larger than {MAX_SECRET} bytes")
    return SecretText(text)


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
    """Encryption method, one of `METHODS`."""
    key: SecretText = field(default_factory=SecretText)
    """Hexadecimal; empty for `PLAINTEXT`."""
    others: tuple[Crypter, ...] = ()
    """Further keys, of what was encrypted before a rotation. Nothing new is encrypted with them."""
    unproven: bool = field(default=False, compare=False)
    """Also accept a backup without a manifest, whose integrity nothing proves: AES-CTR has no authentication."""

    @classmethod
    def of(cls, method: str, *keys: SecretText, unproven: bool = False) -> Crypter:
        """Parse the flags; without a ``method`` it follows from the length of each key. New objects get the first key.

        Raises `UsageError`, which never repeats a key.
        """
        first, *others = [cls._of(method, key) for key in keys] or [cls._of(method, SecretText())]
        return replace(first, others=tuple(others), unproven=unproven)

    @classmethod
    def _of(cls, method: str, key: SecretText) -> Crypter:
        method = method.lower()
        if method and method not in METHODS:
            raise UsageError(f"--crypter.method must be one of {', '.join(METHODS)}, not {method!r}")
        if method == PLAINTEXT or not (method or key):
            return cls()
        if not key:
            raise UsageError("encryption is enabled, but no key was passed", hint="Pass --crypter.key-file.")
        try:
            size = len(bytes.fromhex(key.reveal()))
        except ValueError:
            raise UsageError("the encryption key is not hexadecimal", hint=_KEY_HINT) from None
        method = method or next((known for known, wanted in KEY_SIZES.items() if wanted == size), "")
        if not method:
            raise UsageError(f"the encryption key has {size} bytes: AES requires 16, 24 or 32", hint=_KEY_HINT)
        if size != KEY_SIZES[method]:
            raise UsageError(
                f"the encryption key has {size} bytes, {method} requires {KEY_SIZES[method]}", hint=_KEY_HINT
            )
        return cls(method, key)

    @property
    def each(self) -> tuple[Crypter, ...]:
        """Itself and the others, each with one key."""
        return (self.alone, *(replace(other, unproven=self.unproven) for other in self.others))

    @property
    def alone(self) -> Crypter:
        """Without the other keys."""
        return replace(self, others=())

    @property
    def encrypts(self) -> bool:
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
        """HMAC-SHA256 under the key. It reveals nothing about the key; different purposes give different values."""
        return hmac.new(self.key_bytes, f"tikv-br {purpose}\0".encode() + data, hashlib.sha256).digest()


PLAIN = Crypter()
"""No encryption."""


def new_iv() -> bytes:
    """An IV that no other file has."""
    return secrets.token_bytes(IV_SIZE)


_KEY_HINT = "Write it as 32, 48 or 64 hexadecimal digits, for instance from `openssl rand -hex 32`."
