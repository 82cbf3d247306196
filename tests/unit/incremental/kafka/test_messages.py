from __future__ import annotations

import base64
import contextlib
import json

import mmh3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.errors import SyncStateDamaged
from tikv_br.incremental.kafka.group import Record
from tikv_br.incremental.kafka.json_protocol import JsonCodec
from tikv_br.incremental.kafka.messages import (
    Change,
    Codec,
    DamagedMessage,
    KafkaMessage,
    KeyEncoding,
    MessageEncoding,
    ResolvedTs,
    UnencodableChange,
)
from tikv_br.incremental.kafka.open_protocol import OpenCodec, murmur3_32

NUMBER = st.integers(0, (1 << 64) - 1)
PUT = st.builds(Change, st.binary(), st.binary(), NUMBER, NUMBER)
DELETE = st.builds(Change, st.binary(), st.just(b""), NUMBER, deleted=st.just(True))
CHANGES = st.lists(PUT | DELETE, max_size=50)
VERSION = bytes.fromhex("0000000000000001")


def prefixed(text: str) -> bytes:
    """A length of 8 bytes, and the text."""
    return len(text).to_bytes(8, "big") + text.encode()


def test_open_protocol_has_the_bytes_of_tikv_cdc() -> None:
    """Put, put without a value, put with an expiry, and delete, in one message, as TiKV-CDC's Go structs are marshalled."""
    changes = [
        Change(b"indexInfo_:_pf01_:_APD0101_:_0", b"0x00", 1),
        Change(b"a", b"", 2),
        Change(b"\xff\xfb", b"\xfb\xff>?", 418658114257813516, 1700000000),
        Change(b"a", b"", 4, deleted=True),
    ]
    [message] = OpenCodec().encode(changes)
    assert message.key == VERSION + b"".join(
        map(
            prefixed,
            [
                '{"ts":1,"k":"aW5kZXhJbmZvXzpfcGYwMV86X0FQRDAxMDFfOl8w","t":4}',
                '{"ts":2,"k":"YQ==","t":4}',
                '{"ts":418658114257813516,"k":"//s=","t":4}',
                '{"ts":4,"k":"YQ==","t":4}',
            ],
        )
    )
    values = ['{"op":1,"v":"MHgwMA=="}', '{"op":1}', '{"op":1,"v":"+/8+Pw==","ex":1700000000}', '{"op":2}']
    assert message.value == b"".join(map(prefixed, values))
    assert message.headers == []
    assert OpenCodec().decode(message) == changes


def test_a_resolved_ts_of_open_protocol() -> None:
    """One event of type 3, and a value that is a length of 0."""
    message = OpenCodec().resolved(418658114257813518)
    assert message == KafkaMessage(VERSION + prefixed('{"ts":418658114257813518,"t":3}'), bytes(8))
    assert OpenCodec().decode(message) == [ResolvedTs(418658114257813518)]


def test_a_message_has_at_most_so_many_changes() -> None:
    """16 by default, in order over all messages."""
    changes = [Change(b"k", b"v", ts) for ts in range(1, 35)]
    messages = list(OpenCodec().encode(changes))
    assert [message.value.count(b'"op"') for message in messages if message.value] == [16, 16, 2]
    assert [event for message in messages for event in OpenCodec().decode(message)] == changes
    assert len(list(OpenCodec(max_batch_size=1).encode(changes))) == 34


def test_a_message_is_not_larger_than_allowed() -> None:
    """Counted as TiKV-CDC does, with 36 bytes for the record: a change that needs exactly the limit passes, one more byte does not."""
    change = Change(b"k", bytes(600), 5)
    need = 36 + 8 + 16 + len('{"ts":5,"k":"aw==","t":4}') + len('{"op":1,"v":""}') + 800
    assert [message.size for message in OpenCodec(need).encode([change, change])] == [need, need]
    with pytest.raises(UnencodableChange, match="max-message-bytes"):
        list(OpenCodec(need - 1).encode([change]))
    [both] = OpenCodec(2 * need - 36 - 8).encode([change, change])
    assert both.size == 2 * need - 36 - 8
    [message] = JsonCodec().encode([change])
    assert next(JsonCodec(max_message_bytes=message.size).encode([change])) == message
    with pytest.raises(UnencodableChange, match="max-message-bytes"):
        list(JsonCodec(max_message_bytes=message.size - 1).encode([change]))


@given(CHANGES, st.integers(1, 20))
def test_open_protocol_brings_back_every_change(changes: list[Change], batch: int) -> None:
    """In order, however they are batched."""
    codec = OpenCodec(max_batch_size=batch)
    assert [event for message in codec.encode(changes) for event in codec.decode(message)] == changes


def test_json_is_as_documented() -> None:
    """Raw key, one object, headers; a delete is a null with headers; a resolved-ts has an empty key."""
    put, delete = JsonCodec().encode([Change(b"a\xff", b"\x00", 7, 1700000000), Change(b"b", b"", 8, deleted=True)])
    assert put.key == b"a\xff"
    assert put.value == b'{"op":"put","key":"Yf8=","ts":7,"expire_ts":1700000000,"value":"AA=="}'
    assert put.headers == [("op", b"put"), ("ts", b"7"), ("expire_ts", b"1700000000")]
    assert delete == KafkaMessage(b"b", None, [("op", b"delete"), ("ts", b"8")])
    assert JsonCodec().resolved(9) == KafkaMessage(
        b"", b'{"op":"resolved","ts":9}', [("op", b"resolved"), ("ts", b"9")]
    )


@pytest.mark.parametrize(
    ("encoding", "key", "value"),
    [
        (MessageEncoding.BASE64, '"w6Qi"', '"eyJhIjogWzEsMi41MF19"'),
        (MessageEncoding.HEX, '"c3a422"', '"7b2261223a205b312c322e35305d7d"'),
        (MessageEncoding.UTF8, '"ä\\""', '"{\\"a\\": [1,2.50]}"'),
        (MessageEncoding.JSON, '"ä\\""', '{"a": [1,2.50]}'),
    ],
)
def test_encodings_of_keys_and_values(encoding: MessageEncoding, key: str, value: str) -> None:
    """Each is readable as JSON, and gives back the same bytes; embedded JSON keeps its own."""
    change = Change('ä"'.encode(), b'{"a": [1,2.50]}', 5)
    [message] = JsonCodec(encoding).encode([change])
    assert message.value is not None
    assert message.value.decode() == f'{{"op":"put","key":{key},"ts":5,"value":{value}}}'
    assert json.loads(message.value)["ts"] == 5
    assert JsonCodec(encoding).decode(message) == [change]


@pytest.mark.parametrize(
    ("encoding", "value", "why"),
    [
        (MessageEncoding.UTF8, b"\xff", "not UTF-8"),
        (MessageEncoding.JSON, b"\xff", "not UTF-8"),
        (MessageEncoding.JSON, b"", "not JSON"),
        (MessageEncoding.JSON, b"{", "not JSON"),
        (MessageEncoding.JSON, b"NaN", "not JSON"),
        (MessageEncoding.JSON, b"1 2", "not JSON"),
        (MessageEncoding.JSON, b"[" * 100_000, "not JSON"),
    ],
)
def test_values_that_an_encoding_cannot_express(encoding: MessageEncoding, value: bytes, why: str) -> None:
    """They are refused rather than changed; the text does not show the value."""
    with pytest.raises(UnencodableChange, match=why):
        list(JsonCodec(encoding).encode([Change(b"k", value, 1)]))


@given(CHANGES, st.sampled_from([MessageEncoding.BASE64, MessageEncoding.HEX]))
def test_json_brings_back_every_change(changes: list[Change], encoding: MessageEncoding) -> None:
    """Bytes of all kinds."""
    codec = JsonCodec(encoding)
    assert [event for message in codec.encode(changes) for event in codec.decode(message)] == changes


@pytest.mark.parametrize(
    ("encoding", "value"), [(MessageEncoding.BASE64, '"eyJhIjoxfQ=="'), (MessageEncoding.JSON, '{"a":1}')]
)
@pytest.mark.parametrize(
    ("key", "expected"),
    [(b"user:1", '"key":"user:1"'), ('ä"\0'.encode(), '"key":"ä\\"\\u0000"'), (b"\xff\x00", '"key_base64":"/wA="')],
)
def test_keys_as_text_where_they_are_text(encoding: MessageEncoding, value: str, key: bytes, expected: str) -> None:
    """A key that is not UTF-8 is in a field of its own, and does not end a sync that writes text."""
    [message] = JsonCodec(encoding, key_encoding=KeyEncoding.TEXT).encode([Change(key, b'{"a":1}', 5)])
    assert message.value is not None
    assert message.value.decode() == f'{{"op":"put",{expected},"ts":5,"value":{value}}}'


@given(st.binary() | st.text().map(str.encode), st.binary())
def test_another_parser_finds_the_bytes_of_every_key(key: bytes, value: bytes) -> None:
    """With keys as text, `json` alone gives back each key, as does a reader that does not know of it."""
    [message] = JsonCodec(key_encoding=KeyEncoding.TEXT).encode([Change(key, value, 5)])
    assert message.value is not None
    fields = json.loads(message.value)
    assert ("key" in fields) != ("key_base64" in fields)
    assert (fields["key"].encode() if "key" in fields else base64.b64decode(fields["key_base64"])) == key
    assert base64.b64decode(fields["value"]) == value
    assert JsonCodec().decode(message) == [Change(key, value, 5)]


@given(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    ),
)
def test_embedded_json_keeps_its_bytes(key: str, value: object) -> None:
    """However it is nested, with or without ASCII; another JSON parser finds the same value."""
    for ascii_only in (False, True):
        text = json.dumps(value, ensure_ascii=ascii_only).encode()
        change = Change(key.encode(), text, 1)
        [message] = JsonCodec(MessageEncoding.JSON).encode([change])
        assert message.value is not None
        assert json.loads(message.value)["value"] == value
        assert JsonCodec(MessageEncoding.JSON).decode(message) == [change]


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (OpenCodec(), KafkaMessage(b"", b"")),
        (OpenCodec(), KafkaMessage(bytes(8), b"")),
        (OpenCodec(), KafkaMessage(VERSION, b"")),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"t":4}'), b"")),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"t":4}')[:-1], prefixed('{"op":1}'))),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"t":9}'), prefixed('{"op":1}'))),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"t":4}'), prefixed('{"op":3}'))),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":-1,"t":4}'), prefixed('{"op":1}'))),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"k":"!","t":4}'), prefixed('{"op":1}'))),
        (OpenCodec(), KafkaMessage(VERSION + prefixed("[]"), prefixed('{"op":1}'))),
        (JsonCodec(), KafkaMessage(b"k", None)),
        (JsonCodec(), KafkaMessage(b"k", b"\xff")),
        (JsonCodec(), KafkaMessage(b"k", b'{"op":"put","ts":1}')),
        (JsonCodec(), KafkaMessage(b"k", b'{"op":"put","ts":true,"value":""}')),
        (JsonCodec(), KafkaMessage(b"k", b'{"op":"put","ts":1,"value":"!"}')),
        (JsonCodec(MessageEncoding.HEX), KafkaMessage(b"k", b'{"op":"put","ts":1,"value":"0"}')),
        (JsonCodec(), KafkaMessage(b"k", b'{"op":"other","ts":1}')),
    ],
)
def test_foreign_messages_are_refused(codec: Codec, message: KafkaMessage) -> None:
    """Messages of other protocols in the topic are reported as such."""
    with pytest.raises(DamagedMessage):
        codec.decode(message)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["put", "resolved", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ts", "t", "k", "op", "v", "ex", "value", "expire_ts"]), inner, max_size=8)
    ),
    max_leaves=12,
)
TEXT = JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30)
OPEN = st.lists(TEXT, max_size=3).map(lambda parts: b"".join(len(part).to_bytes(8) + part for part in parts))
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["op", "ts", "keyspace"]),
        st.sampled_from([b"delete", b"", b"9" * 5000]) | st.binary(max_size=22),
    ),
    max_size=3,
)


@given(
    st.one_of(
        st.tuples(st.just(OpenCodec()), st.builds(KafkaMessage, OPEN.map(lambda key: VERSION + key), OPEN, HEADERS)),
        st.tuples(
            st.sampled_from([JsonCodec(encoding) for encoding in MessageEncoding]),
            st.builds(KafkaMessage, st.binary(max_size=5), TEXT | st.none(), HEADERS),
        ),
    )
)
def test_whatever_a_message_holds_it_is_decoded_or_damaged(case: tuple[Codec, KafkaMessage]) -> None:
    """Anybody may write to a topic: no message ends a replay with another error, and numbers have 64 bits."""
    codec, message = case
    try:
        events = codec.decode(message)
    except DamagedMessage:
        return
    assert all(0 <= event.ts < 1 << 64 for event in events)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"k":"YQ==","t":4}'), prefixed('{"op":[]}'))),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"k":"YQ==","t":4}'), prefixed('{"op":true}'))),
        (OpenCodec(), KafkaMessage(VERSION + prefixed('{"ts":1,"k":"YQ==","t":[]}'), prefixed('{"op":1}'))),
        (JsonCodec(), KafkaMessage(b"k", None, [("op", b"delete"), ("ts", b"9" * 5000)])),
        (JsonCodec(), KafkaMessage(b"k", None, [("op", b"delete"), ("ts", b"18446744073709551616")])),
        (JsonCodec(MessageEncoding.UTF8), KafkaMessage(b"k", b'{"op":"put","ts":1,"value":"\\ud800"}')),
    ],
)
def test_crafted_messages_are_damaged(codec: Codec, message: KafkaMessage) -> None:
    """Values of another type, numbers of 5,000 digits, halves of characters."""
    with pytest.raises(DamagedMessage):
        codec.decode(message)


@pytest.mark.parametrize(
    "metadata", ['{"ts":1e400}', '{"ts":-1}', '{"v":[]}', "[" * 9999, '{"ts":true}', "[]", '{"ts":"9"}']
)
def test_offsets_of_other_programs_have_no_record(metadata: str) -> None:
    """What a commit's metadata holds is anybody's, too."""
    with contextlib.suppress(SyncStateDamaged):
        assert Record.load(metadata, "partition 0") == Record()


@given(st.binary(max_size=100))
def test_murmur3_as_others_compute_it(data: bytes) -> None:
    """Another implementation agrees, so the partition is the one of TiKV-CDC."""
    assert murmur3_32(data) == mmh3.hash(data, 0, signed=False)
    assert OpenCodec().partition(data, 7) == mmh3.hash(data, 0, signed=False) % 7


def test_base64_is_the_standard_alphabet() -> None:
    """As Go's encoding/json writes bytes: + and /, padded."""
    [message] = OpenCodec().encode([Change(bytes(range(256)), b"", 1)])
    assert base64.b64encode(bytes(range(256))) in message.key
