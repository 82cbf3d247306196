"""Every message that real servers and tools wrote decodes with our own subset of the wire format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tikv_br.cluster.pb import (
    brpb_pb2,
    cdcpb_pb2,
    import_sstpb_pb2,
    keyspacepb_pb2,
    kvrpcpb_pb2,
    pdpb_pb2,
    tikvpb_pb2,
)

MODULES = (brpb_pb2, cdcpb_pb2, import_sstpb_pb2, keyspacepb_pb2, kvrpcpb_pb2, pdpb_pb2, tikvpb_pb2)
SERVICES = {
    "PD": ("pdpb", "PD"),
    "Keyspace": ("keyspacepb", "Keyspace"),
    "ImportSST": ("import_sstpb", "ImportSST"),
    "ChangeData": ("cdcpb", "ChangeData"),
}


def message_class(full_name: str) -> type[Message]:
    """Class of a message by its public name, `package.Message`."""
    package, _, name = full_name.partition(".")
    module = next(module for module in MODULES if package == module.DESCRIPTOR.package)
    return message_factory.GetMessageClass(module.DESCRIPTOR.message_types_by_name[name])


def unknown_fields(message: Message) -> Iterator[str]:
    """`package.Message#number` of every field, at any depth, that our subset does not name."""
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield f"{message.DESCRIPTOR.full_name}#{unknown[index].field_number}"
    for _descriptor, value in message.ListFields():
        parts = [value] if isinstance(value, Message) else value if hasattr(value, "add") else []
        for part in parts:
            yield from unknown_fields(part)


def parse(full_name: str, data: bytes) -> Message:
    """Decode, and prove that no byte was left without a meaning."""
    message = message_class(full_name).FromString(data)
    assert list(unknown_fields(message)) == []
    return message


def as_json(message: Message) -> dict[str, Any]:
    """The form the recordings use."""
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def frames(path: Path) -> list[bytes]:
    """The messages of a file of (u32 big-endian length + message)*."""
    data = path.read_bytes()
    found = []
    offset = 0
    while offset < len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        found.append(data[offset + 4 : offset + 4 + length])
        offset += 4 + length
    return found


def recorded_rpcs(golden: Path, cluster: str) -> list[dict[str, Any]]:
    """The gRPC entries of one cluster's index, in recording order."""
    index = json.loads((golden / "wire" / cluster / "index.json").read_text())
    return [entry for entry in index["entries"] if entry["rpc"] != "HTTP"]


@pytest.mark.parametrize("cluster", ["v1", "v1ttl", "v2", "v2_3replicas"])
def test_recorded_rpcs_decode_to_the_recorded_form(golden: Path, cluster: str) -> None:
    """Each recorded request and answer parses as its type, whole, and its JSON is the recorded one."""
    folder = golden / "wire" / cluster
    for entry in recorded_rpcs(golden, cluster):
        where = (entry["rpc"], entry["condition"])
        requests = [parse(entry["request_type"], (folder / name).read_bytes()) for name in entry["request_files"]]
        assert as_json(requests[0]) == entry["request"], where
        answers = [parse(entry["response_type"], (folder / name).read_bytes()) for name in entry["response_files"]]
        assert [as_json(answer) for answer in answers] == entry.get("responses", []), where


@pytest.mark.parametrize("cluster", ["v1", "v1ttl", "v2", "v2_3replicas"])
def test_every_recorded_method_is_in_a_service(golden: Path, cluster: str) -> None:
    """Our services know every recorded method, with the recorded request and answer types."""
    for entry in recorded_rpcs(golden, cluster):
        service, _, method = entry["rpc"].rpartition("/")
        package, name = SERVICES.get(service, ("tikvpb", "Tikv"))
        if entry["rpc"] == "Backup":
            package, name, method = "backup", "Backup", "backup"
        module = next(module for module in MODULES if package == module.DESCRIPTOR.package)
        known = module.DESCRIPTOR.services_by_name[name].methods_by_name[method]
        assert known.input_type.full_name == entry["request_type"]
        if entry.get("response_type"):
            assert known.output_type.full_name == entry["response_type"]


def test_recorded_change_feeds_decode_to_the_recorded_form(golden: Path) -> None:
    """Each recorded subscription and event parses, whole; long events are compared by size, the rest by form."""
    scenarios = [path.parent for path in sorted((golden / "cdc").glob("*/frames.json"))]
    assert scenarios
    for folder in scenarios:
        recorded = json.loads((folder / "frames.json").read_text())
        for data, entry in zip(frames(folder / "requests.bin"), recorded["requests"], strict=True):
            assert as_json(parse("cdcpb.ChangeDataRequest", data)) == entry["request"]
        for data, entry in zip(frames(folder / "frames.bin"), recorded["frames"], strict=True):
            event = as_json(parse("cdcpb.ChangeDataEvent", data))
            assert len(data) == entry["bytes"]
            if "_summary" not in entry["event"]:
                assert event == entry["event"]


@pytest.mark.parametrize(
    "name",
    ["v1", "v1_lz4", "v1_snappy", "v1_to_v2", "v1ttl", "v1ttl_to_v2", "v2", "v2_3stores", "v2_ks1_rpc", "v2_ks4242_rpc", "v2_ranged"],
)  # fmt: skip
def test_recorded_backupmeta_decodes(golden: Path, name: str) -> None:
    """A real `backupmeta` parses completely, and equals the result of the recorder's own decoder."""
    folder = golden / "backups" / name
    meta = parse("backup.BackupMeta", (folder / "data" / "backupmeta").read_bytes())
    assert isinstance(meta, brpb_pb2.BackupMeta)
    recorded = json.loads((folder / "meta.json").read_text())["backupmeta"]
    for field in ("cluster_id", "cluster_version", "version", "api_version", "is_raw_kv", "start_version"):
        assert getattr(meta, field) == recorded[field]
    assert meta.ddls.decode() == recorded["ddls"]
    assert [(r.start_key.hex(), r.end_key.hex(), r.cf) for r in meta.raw_ranges] == [
        (r["start"], r["end"], r["cf"]) for r in recorded["raw_ranges"]
    ]
    assert len(meta.files) == len(recorded["files"]) > 0
    for file, expected in zip(meta.files, recorded["files"], strict=True):
        for field, value in expected.items():
            decoded = getattr(file, field)
            assert (decoded.hex() if isinstance(decoded, bytes) else decoded) == value
