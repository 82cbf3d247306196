from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.formats.rawscan import parse


def recorded(golden: Path) -> Iterator[tuple[str, bytes]]:
    """Every RawScan answer of the recorded servers, with the file's name."""
    for index in sorted(golden.glob("wire/*/index.json")):
        for entry in json.loads(index.read_text())["entries"]:
            if entry["rpc"] == "RawScan":
                for name in entry["response_files"]:
                    yield f"{index.parent.name}/{name}", (index.parent / name).read_bytes()


def test_answers_of_real_servers_are_parsed_or_left_to_protobuf(golden: Path) -> None:
    """Pages of pairs come out as protobuf reads them; answers with a region error or a failed pair give None."""
    pages = errors = 0
    for name, data in recorded(golden):
        message = kvrpcpb_pb2.RawScanResponse.FromString(data)
        page = parse(data)
        if message.HasField("region_error") or any(pair.HasField("error") for pair in message.kvs):
            assert page is None, name
            errors += 1
        else:
            assert page is not None, name
            assert page.keys.to_pylist() == [pair.key for pair in message.kvs], name
            assert page.values.to_pylist() == [pair.value for pair in message.kvs], name
            pages += 1
    assert pages
    assert errors
