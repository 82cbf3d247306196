from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br import records
from tikv_br.errors import BackupDamaged, BackupUnsupported
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.json_types import ApiLabel, Hex


@dataclass(frozen=True)
class Inner:
    """A part of the sample."""

    data: Hex


@dataclass(frozen=True)
class Sample:
    """One field of each type that records may have."""

    text: str
    number: int
    flag: bool
    data: Hex
    version: ApiLabel
    inner: Inner
    many: tuple[Inner, ...]
    maybe: Inner | None


SAMPLES = st.builds(
    Sample,
    text=st.text(st.characters(exclude_categories=["Cs"])),
    number=st.integers(0, 2**64 - 1),
    flag=st.booleans(),
    data=st.binary(),
    version=st.sampled_from(ApiVersion),
    inner=st.builds(Inner, st.binary()),
    many=st.lists(st.builds(Inner, st.binary()), max_size=3).map(tuple),
    maybe=st.none() | st.builds(Inner, st.binary()),
)
ONE = Sample("t", 1, True, b"\x01", ApiVersion.V2, Inner(b""), (Inner(b"\xff"),), None)


def reseal(change: dict[str, Any], **outer: object) -> bytes:
    """The document of ONE with other content, sealed as a patient editor would."""
    document = json.loads(records.dump(ONE))
    document["content"] |= change
    canonical = json.dumps(document["content"], sort_keys=True, separators=(",", ":")).encode()
    document["content_sha256"] = hashlib.sha256(canonical).hexdigest()
    return json.dumps(document | outer).encode()


def content_of(sample: Sample) -> bytes:
    """The content of its document, as it is hashed."""
    return json.dumps(json.loads(records.dump(sample))["content"], sort_keys=True, separators=(",", ":")).encode()


def compact(content: bytes) -> bytes:
    """A document on one line."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return b'{"format_version": 1, "content": %s, "content_sha256": "%s"}\n' % (content, digest)


@given(SAMPLES)
def test_round_trip(sample: Sample) -> None:
    """All types and values survive dump and load."""
    assert records.load(Sample, records.dump(sample), "x.json") == sample


def test_form() -> None:
    """The document is JSON that other tools read: bytes as hex, versions as labels."""
    document = json.loads(records.dump(ONE))
    assert document["format_version"] == 1
    assert document["content"]["data"] == "01"
    assert document["content"]["version"] == "v2"
    assert document["content"]["maybe"] is None


@given(st.data())
def test_no_altered_byte_goes_unnoticed(data: st.DataObject) -> None:
    """Any byte replaced, or the end cut off, either is refused or has changed nothing but white space."""
    whole = records.dump(ONE)
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.binary(min_size=1, max_size=1))
    for altered in (whole[:place] + byte + whole[place + 1 :], whole[:place]):
        try:
            loaded = records.load(Sample, altered, "x.json")
        except (BackupDamaged, BackupUnsupported):
            continue
        assert loaded == ONE


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"number": -1}, "number: -1 is not an unsigned integer"),
        ({"number": 2**64}, "number: 18446744073709551616 is not an unsigned integer"),
        ({"number": True}, "number: expected int, got bool"),
        ({"number": "1"}, "number: expected int, got str"),
        ({"number": None}, "number: expected int, got null"),
        ({"flag": 1}, "flag: expected bool, got int"),
        ({"text": 1}, "text: expected str, got int"),
        ({"data": "0"}, "data: expected bytes in hex"),
        ({"data": 0}, "data: expected bytes in hex"),
        ({"version": "v9"}, "version: unknown API version 'v9'"),
        ({"version": 2}, "version: expected an API version"),
        ({"inner": []}, "inner: expected object, got array"),
        ({"inner": {}}, "inner: object missing required field data"),
        ({"inner": {"data": "", "more": 1}}, "inner has missing or unknown fields: more"),
        ({"many": {}}, "many: expected array, got object"),
        ({"many": [{"data": "zz"}]}, r"many\[0\]\.data: expected bytes in hex"),
        ({"extra": 1}, "has missing or unknown fields: extra"),
    ],
)
def test_types_are_strict(change: dict[str, Any], sentence: str) -> None:
    """A field of another type, unknown or out of range is refused by its name, though the seal be right."""
    with pytest.raises(BackupDamaged, match=sentence) as caught:
        records.load(Sample, reseal(change), "folder/x.json")
    assert "folder/x.json" in caught.value.message


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (b'"number":-1', "number: -1 is not"),
        (b'"number":18446744073709551616', "number: 18446744073709551616 is not"),
        (b'"number":1,"number":1', "appears twice"),
        (b'"number":1.0', "number: expected int, got float"),
        (b'"none":1,"number":1', "unknown fields: none"),
        (b'"nunber":1', "missing required field number"),
    ],
)
def test_compact_documents_are_read_as_strictly(change: bytes, sentence: str) -> None:
    """They are decoded by a shorter path if the content is as it is hashed, and else as any document."""
    with pytest.raises(BackupDamaged, match=sentence):
        records.load(Sample, compact(content_of(ONE).replace(b'"number":1', change)), "x")


@given(SAMPLES)
def test_older_forms_are_read(sample: Sample) -> None:
    """As version 1.0.0rc1 wrote ledgers, on one line, and other records, indented."""
    content = content_of(sample)
    assert records.load(Sample, compact(content), "x.json") == sample
    digest = hashlib.sha256(content).hexdigest()
    document = {"format_version": 1, "content": json.loads(content), "content_sha256": digest}
    assert records.load(Sample, (json.dumps(document, indent=1) + "\n").encode(), "x.json") == sample


def test_missing_field() -> None:
    """No field may be left out."""
    document = json.loads(reseal({}))
    del document["content"]["flag"]
    canonical = json.dumps(document["content"], sort_keys=True, separators=(",", ":")).encode()
    document["content_sha256"] = hashlib.sha256(canonical).hexdigest()
    with pytest.raises(BackupDamaged, match="missing required field flag"):
        records.load(Sample, json.dumps(document).encode(), "x.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"1", b"\xff\xfe", b"null", b"[" * 100_000, b'{"a":1,"a":1}', b'{"format_version": 1.5}', b"{}"],
)
def test_garbage(data: bytes) -> None:
    """Any other bytes raise BackupDamaged, never another exception."""
    with pytest.raises(BackupDamaged, match=r"x\.json"):
        records.load(Sample, data, "x.json")


@pytest.mark.parametrize("depth", [300, 999, 1_000, 100_000])
@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_content_nested_too_deeply(depth: int, begin: bytes, end: bytes) -> None:
    """With the hash that belongs to it: the seal of one who writes it does not make it a record."""
    for content in (begin * depth + b"1" + end * depth, b'{"flag":' + begin * depth + b"1" + end * depth + b"}"):
        with pytest.raises(BackupDamaged, match=r"x\.json"):
            records.load(Sample, compact(content), "x.json")


def test_edited_content_is_noticed() -> None:
    """A well-meant edit without a new seal is refused."""
    edited = records.dump(ONE).replace(b'"number":1', b'"number":2')
    with pytest.raises(
        BackupDamaged, match=r"checksum mismatch \(expected sha256 [0-9a-f]{16}…, found [0-9a-f]{16}…\)"
    ):
        records.load(Sample, edited, "x.json")


def test_empty_and_truncated_documents_say_so() -> None:
    """An object that an upload or a disk lost the end of is no riddle."""
    whole = records.dump(ONE)
    for data, problem in (
        (b"", r"x\.json is empty"),
        (whole[: len(whole) // 2], rf"x\.json is truncated: it ends after {len(whole) // 2} bytes"),
        (whole[:-1], rf"x\.json is truncated: its last byte is missing \({len(whole) - 1} bytes\)"),
    ):
        with pytest.raises(BackupDamaged, match=problem):
            records.load(Sample, data, "x.json")


def test_a_field_that_came_later_may_be_missing() -> None:
    """An older document reads, with the default value; a newer one that does not need the field is as an older one."""

    class New(msgspec.Struct, frozen=True):
        data: Hex
        notes: records.Later[tuple[int, ...]] = ()

    old = records.dump(Inner(b"x"))
    assert records.dump(New(b"x")) == old
    assert records.load(New, old, "x.json") == New(b"x")
    assert records.load(New, records.dump(New(b"x", (1, 2))), "x.json") == New(b"x", (1, 2))
    with pytest.raises(BackupDamaged, match="has missing or unknown fields: notes"):
        records.load(Inner, records.dump(New(b"x", (1,))), "x.json")


def test_newer_format() -> None:
    """A later format is not damage; the message names it and the remedy."""
    with pytest.raises(BackupUnsupported, match="format 3") as caught:
        records.load(Sample, reseal({}, format_version=3, further="field"), "x.json")
    assert "newer tikv-br" in caught.value.hint
    with pytest.raises(BackupDamaged):
        records.load(Sample, reseal({}, format_version=0), "x.json")


def test_a_damaged_version_is_told_from_a_newer_one() -> None:
    """One that reads as ours in all else is damaged: a change of the fields changes the version."""
    for version in (0, 2, 3, 5, 9):
        with pytest.raises(BackupDamaged, match="format version"):
            records.load(Sample, records.dump(ONE).replace(b": 1,", b": %d," % version, 1), "x.json")


def test_every_flipped_bit_is_noticed() -> None:
    """Each bit of a document, one after the other."""
    whole = records.dump(ONE)
    for place in range(len(whole)):
        for bit in range(8):
            altered = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            with pytest.raises(BackupDamaged):
                records.load(Sample, altered, "x.json")
