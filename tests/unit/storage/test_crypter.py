"""AES in counter mode against the openssl program and NIST's own examples, and keys that never show."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.openssl import KEYS, crypt, crypter
from tikv_br.cluster.pb import encryptionpb_pb2
from tikv_br.errors import UsageError
from tikv_br.storage.credentials import to_cipher_info
from tikv_br.storage.crypter import IV_SIZE, PLAIN, Crypter, SecretText
from tikv_br.storage.url import StorageLocation

DATA = random.Random(5).randbytes(5000)
LAST_COUNTERS = b"\xff" * 15 + b"\xfe"
"""An IV after which the counter wraps around at once."""


@pytest.mark.parametrize("method", KEYS)
@pytest.mark.parametrize("iv", [bytes(range(16)), LAST_COUNTERS])
def test_openssl_reads_what_was_encrypted_in_pieces(method: str, iv: bytes) -> None:
    """Pieces of any length make the ciphertext of the whole, also where the 128-bit counter overflows."""
    encrypt = crypter(method).stream(iv)
    pieces = [encrypt(DATA[:1]), encrypt(memoryview(DATA)[1:40]), encrypt(bytearray(DATA[40:40])), encrypt(DATA[40:])]
    assert b"".join(pieces) == crypt(method, iv, DATA)


@given(st.integers(0, len(DATA)), st.integers(0, 300), st.sampled_from([bytes(16), LAST_COUNTERS]))
def test_any_range_decrypts_by_itself(offset: int, length: int, iv: bytes) -> None:
    """A range of the ciphertext and its offset are enough."""
    whole = crypter("aes128-ctr").stream(iv)(DATA)
    part = crypter("aes128-ctr").stream(iv, offset)(whole[offset : offset + length])
    assert part == DATA[offset : offset + length]


@pytest.mark.parametrize("method", KEYS)
def test_the_length_of_the_key_tells_the_method(method: str) -> None:
    """A key is enough; the method may be said in capitals, as the Go tool takes it; plaintext overrides a key."""
    key = SecretText(KEYS[method])
    assert Crypter.of("", key) == Crypter.of(method.upper(), key) == crypter(method)
    assert len(crypter(method).key_bytes) * 2 == len(KEYS[method])
    assert Crypter.of("plaintext", key) == Crypter.of("", SecretText()) == PLAIN


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("aes512-ctr", "ab" * 16),
        ("aes256-ctr", ""),
        ("aes256-ctr", "ab" * 16),
        ("", "ab" * 17),
        ("aes128-ctr", "abcdefgh" * 4),
        ("aes128-ctr", "abababa"),
    ],
)
def test_invalid_keys_are_refused_and_not_repeated(method: str, key: str) -> None:
    """Unknown method, no key, wrong length, no hexadecimal: a sentence and a hint without the key."""
    with pytest.raises(UsageError) as raised:
        Crypter.of(method, SecretText(key))
    assert not key or key not in f"{raised.value} {raised.value.hint} {raised.value.__context__!r}"


def test_it_travels_and_does_not_show() -> None:
    """Pickled it works at the other end; neither it nor its location shows the key, or has it in the URL."""
    location = StorageLocation("local", "/b", crypter=crypter("aes256-ctr"))
    assert pickle.loads(pickle.dumps(location)) == location
    assert location.child("x").crypter == location.crypter
    shown = f"{location!r} {location} {location.redacted()} {location.crypter!r} {location.crypter}"
    assert KEYS["aes256-ctr"] not in shown
    assert repr(bytes.fromhex(KEYS["aes256-ctr"])) not in shown


def test_the_check_value_is_no_key_and_no_ciphertext() -> None:
    """Each purpose and each content has a value of its own, none of them a part of the key stream."""
    made = crypter("aes128-ctr")
    values = {made.mac("a", b"x"), made.mac("b", b"x"), made.mac("a", b"y")}
    assert len(values) == 3
    assert made.stream(bytes(IV_SIZE))(bytes(32)) not in values


def test_stores_are_told_the_method_and_the_key() -> None:
    """In the wire's own numbers; without encryption they are told that it is plaintext, as the Go tool does."""
    said = to_cipher_info(StorageLocation("local", "/b", crypter=crypter("aes192-ctr")))
    assert (said.cipher_type, said.cipher_key) == (encryptionpb_pb2.AES192_CTR, bytes.fromhex(KEYS["aes192-ctr"]))
    plain = to_cipher_info(StorageLocation("local", "/b"))
    assert (plain.cipher_type, plain.cipher_key) == (encryptionpb_pb2.PLAINTEXT, b"")
