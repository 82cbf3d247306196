"""AES in counter mode by the openssl program: an independent judge of ciphertext."""

from __future__ import annotations

import subprocess

from tikv_br.storage.crypter import Crypter, SecretText

KEYS = {
    "aes128-ctr": "000102030405060708090a0b0c0d0e0f",
    "aes192-ctr": "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0001020304050607",
    "aes256-ctr": "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
}


def crypter(method: str) -> Crypter:
    """Return a crypter with the key of `KEYS`."""
    return Crypter.of(method, SecretText(KEYS[method]))


def crypt(method: str, iv: bytes, data: bytes) -> bytes:
    """Encrypt, or decrypt, which is the same."""
    name = f"-{method[:3]}-{method[3:6]}-ctr"
    command = ["openssl", "enc", name, "-K", KEYS[method], "-iv", iv.hex()]
    return subprocess.run(command, input=data, capture_output=True, check=True, timeout=60).stdout
