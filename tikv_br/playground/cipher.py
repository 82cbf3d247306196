"""Backup files at rest: plain, or under AES in counter mode."""

from __future__ import annotations

from typing import Final

from tikv_br.cluster.pb import brpb_pb2, encryptionpb_pb2

IV_SIZE: Final = 16
_PLAIN: Final = (encryptionpb_pb2.UNKNOWN, encryptionpb_pb2.PLAINTEXT)
_KEY_SIZES: Final = {encryptionpb_pb2.AES128_CTR: 16, encryptionpb_pb2.AES192_CTR: 24, encryptionpb_pb2.AES256_CTR: 32}


class CipherFault(Exception):
    """No such method here, or a key of the wrong length."""


def crypt(info: brpb_pb2.CipherInfo, iv: bytes, data: bytes) -> bytes:
    """Encrypt or decrypt (counter mode: both are the same); plain data come back as they are.

    Raises `CipherFault`.
    """
    if info.cipher_type in _PLAIN:
        return data
    size = _KEY_SIZES.get(info.cipher_type)
    if size is None:
        raise CipherFault(f"encryption method {info.cipher_type} is not supported")
    if len(info.cipher_key) != size:
        raise CipherFault(f"encryption key has {len(info.cipher_key)} bytes, the method takes {size}")
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    context = Cipher(algorithms.AES(info.cipher_key), modes.CTR(iv)).encryptor()
    return context.update(data) + context.finalize()
