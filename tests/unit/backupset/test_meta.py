from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tikv_br.backupset import backupmeta
from tikv_br.backupset.backupmeta import MetaContent
from tikv_br.backupset.files import ColumnFamily, FileEntry
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged, BackupUnsupported, CrypterMismatch, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange

U64 = st.integers(0, 2**64 - 1)


@st.composite
def contents(draw: st.DrawFn) -> MetaContent:
    """A sound content of any API version, its files anywhere in its range."""
    version = draw(st.sampled_from(ApiVersion))
    prefix = b"r\0\x10\x92" if version is ApiVersion.V2 else b""
    cuts = sorted(draw(st.sets(st.binary(min_size=1, max_size=5), max_size=4)))
    end = b"r\0\x10\x93" if version is ApiVersion.V2 else b""
    bounds = [prefix, *(prefix + cut for cut in cuts), end]
    files = tuple(
        FileEntry(
            name=f"1/{number}_default.sst",
            size=draw(U64),
            start_key=bounds[number],
            end_key=bounds[number + 1],
            crc64xor=draw(U64),
            total_kvs=draw(U64),
            total_bytes=draw(U64),
            sha256=draw(st.binary(max_size=32)),
            cipher_iv=draw(st.binary(max_size=16)),
        )
        for number in range(len(bounds) - 1)
    )
    return MetaContent(draw(U64), "8.5.0", "tool", version, (KeyRange(prefix, end),), files, draw(U64))


@given(contents())
def test_round_trip_of_transactional_data(content: MetaContent) -> None:
    """Both files of a part have its range; ranges are not recorded, as by BR."""
    prefix = b"x" if content.api_version is ApiVersion.V2 else b""

    def of_txn(file: FileEntry, cf: ColumnFamily) -> FileEntry:
        start, end = (prefix + key[len(prefix) :] for key in (file.start_key, file.end_key))
        return structs.replace(file, name=file.name.replace("default", cf), start_key=start, end_key=end, cf=cf)

    families: tuple[ColumnFamily, ...] = ("default", "write")
    files = tuple(of_txn(file, cf) for file in content.files for cf in families)
    txn = structs.replace(content, ranges=(), files=files, key_mode=KeyMode.TXN)
    message = brpb_pb2.BackupMeta.FromString(backupmeta.encode(txn))
    assert (message.is_raw_kv, message.is_txn_kv, len(message.raw_ranges)) == (False, True, 0)
    assert [file.cf for file in message.files] == [*families] * len(content.files)
    assert backupmeta.decode(backupmeta.encode(txn)) == txn


@given(contents())
def test_round_trip(content: MetaContent) -> None:
    """All that a meta says survives, and the same content gives the same bytes."""
    data = backupmeta.encode(content)
    assert backupmeta.decode(data) == content
    assert backupmeta.encode(backupmeta.decode(data)) == data


SOUND = MetaContent(
    cluster_id=1,
    cluster_version="8.5.0",
    tool="tikv-br 0.1.0",
    api_version=ApiVersion.V2,
    ranges=(KeyRange(b"r\0\0\0", b"r\0\0\1"),),
    files=(FileEntry("sst/a_default.sst", 10, b"r\0\0\0", b"r\0\0\1", 1, 2, 3, sha256=b"\1" * 32),),
)


def test_demands_of_the_go_tool() -> None:
    """The fields that make the Go tool refuse, lose rows or crash when they are absent are there."""
    message = brpb_pb2.BackupMeta.FromString(backupmeta.encode(structs.replace(SOUND, backup_ts=99)))
    assert message.is_raw_kv
    assert message.api_version == 2
    assert message.version == 0
    assert message.ddls == b"[]"
    assert message.br_version == "tikv-br 0.1.0"
    assert [(part.start_key, part.end_key, part.cf) for part in message.raw_ranges] == [
        (b"r\0\0\0", b"r\0\0\1", "default")
    ]
    (file,) = message.files
    assert (file.cf, file.start_key, file.end_key, file.size) == ("default", b"r\0\0\0", b"r\0\0\1", 10)
    assert (file.crc64xor, file.total_kvs, file.total_bytes) == (1, 2, 3)
    assert message.end_version == 99
    assert message.start_version == 0


def edited(edit: Callable[[brpb_pb2.BackupMeta], object]) -> bytes:
    """The bytes of SOUND after an edit of its message."""
    message = brpb_pb2.BackupMeta.FromString(backupmeta.encode(SOUND))
    edit(message)
    return message.SerializeToString()


def _set(path: str, value: object) -> Callable[[brpb_pb2.BackupMeta], None]:
    def edit(message: brpb_pb2.BackupMeta) -> None:
        target: object = message
        *parents, last = path.split(".")
        for parent in parents:
            target = getattr(target, parent)
            if parent in {"files", "raw_ranges"}:
                target = target[0]  # type: ignore[index]  # repeated
        setattr(target, last, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "kind", "sentence"),
    [
        (_set("is_raw_kv", False), BackupUnsupported, "of TiDB"),
        (_set("is_txn_kv", True), BackupUnsupported, "of TiDB"),
        (_set("api_version", 3), BackupUnsupported, r"number 3: API V3 \(namespaces\) is not supported"),
        (_set("api_version", 77), BackupUnsupported, "API version number 77"),
        (_set("files.cf", "write"), BackupUnsupported, "column family 'write'"),
        (_set("files.cf", ""), BackupDamaged, "without column family"),
        (_set("raw_ranges.cf", "lock"), BackupUnsupported, "column family 'lock'"),
        (_set("br_version", ""), BackupDamaged, "ends too early"),
        (_set("files.name", ""), BackupDamaged, "invalid file name"),
        (_set("files.name", "../../etc/passwd"), BackupDamaged, "invalid file name"),
        (_set("files.name", "/etc/passwd"), BackupDamaged, "invalid file name"),
        (_set("files.end_key", b""), BackupDamaged, "outside"),
        (_set("files.start_key", b"q"), BackupDamaged, "outside"),
        (_set("files.end_key", b"r\0\0\0"), BackupDamaged, "outside"),
        (_set("raw_ranges.start_key", b"m"), BackupDamaged, "not a range of API V2"),
        (lambda message: message.ClearField("raw_ranges"), BackupDamaged, "no range"),
        (lambda message: message.files.append(message.files[0]), BackupDamaged, "twice"),
        (
            lambda message: (
                message.ClearField("files"),
                message.file_index.meta_files.add(name="backupmeta.datafile.1"),
            ),
            BackupUnsupported,
            "in separate objects",
        ),
    ],
)
def test_unsound_metas(edit: Callable[[brpb_pb2.BackupMeta], object], kind: type[TikvBrError], sentence: str) -> None:
    """Each thing that a meta must not be has its class and its sentence."""
    with pytest.raises(TikvBrError, match=sentence) as caught:
        backupmeta.decode(edited(edit))
    assert type(caught.value) is kind


def test_harmless_differences_are_accepted() -> None:
    """Differences that the Go tool ignores are accepted: missing sums, layout number, unknown fields."""
    for edit in (_set("version", 1), _set("files.sha256", b""), _set("files.size", 0), _set("cluster_id", 0)):
        backupmeta.decode(edited(edit))
    unknown_field_30 = b"\xf2\x01\x01x"
    assert backupmeta.decode(edited(lambda _message: None) + unknown_field_30) == SOUND
    for number in (3, 7):  # what another field may have become
        with pytest.raises(BackupDamaged, match="fields that no tool writes"):
            backupmeta.decode(edited(lambda _message: None) + bytes([number << 3 | 2, 1]) + b"x")


@given(st.integers(0, len(backupmeta.encode(SOUND)) - 1))
def test_cut_meta(place: int) -> None:
    """Wherever a meta is cut, it is refused, or what remains says the same but for the last field."""
    try:
        rest = backupmeta.decode(backupmeta.encode(SOUND)[:place])
    except (BackupDamaged, BackupUnsupported):
        return
    assert structs.replace(rest, api_version=SOUND.api_version, ranges=SOUND.ranges) == SOUND


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    """No bytes at all make anything but a refusal of ours."""
    with pytest.raises((BackupDamaged, BackupUnsupported)):
        backupmeta.decode(data)


def test_encrypted_meta_is_told_from_a_damaged_one() -> None:
    """Ciphertext asks for a key; a meta with a flipped or missing byte is damage."""
    files = tuple(structs.replace(SOUND.files[0], name=f"sst/{number}_default.sst") for number in range(50))
    plain = backupmeta.encode(structs.replace(SOUND, files=files))
    stream = bytes(a ^ b for a, b in zip(plain, os.urandom(len(plain)), strict=True))
    with pytest.raises(CrypterMismatch, match="encrypted"):
        backupmeta.decode(b"\xff" + os.urandom(15) + stream)
    with pytest.raises(BackupDamaged, match="truncated or altered"):
        backupmeta.decode(plain[:-1])
    with pytest.raises(BackupDamaged, match="truncated or altered"):
        backupmeta.decode(b"\xff" + plain[1:])
