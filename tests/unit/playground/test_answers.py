from __future__ import annotations

import pytest

from tikv_br.cluster.pb import brpb_pb2, errorpb_pb2, import_sstpb_pb2, kvrpcpb_pb2, metapb_pb2, pdpb_pb2
from tikv_br.playground import region_errors

ERROR = errorpb_pb2.Error(message="m", region_not_found=errorpb_pb2.RegionNotFound(region_id=3))


@pytest.mark.parametrize(
    ("rpc", "expected"),
    [
        ("RawScan", kvrpcpb_pb2.RawScanResponse(region_error=ERROR)),
        ("SplitRegion", kvrpcpb_pb2.SplitRegionResponse(region_error=ERROR)),
        ("ingest", import_sstpb_pb2.IngestResponse(error=ERROR)),
        ("backup", brpb_pb2.BackupResponse(error=brpb_pb2.Error(region_error=ERROR))),
        (
            "Download",
            import_sstpb_pb2.DownloadResponse(error=import_sstpb_pb2.Error(message="m", store_error=ERROR)),
        ),
    ],
)
def test_a_region_error_in_its_place(rpc: str, expected: object) -> None:
    """Each RPC's answer carries the region error in the field where its clients look for it."""
    assert region_errors.with_region_error(rpc, ERROR) == expected
    assert region_errors.can_carry_region_error(rpc)


@pytest.mark.parametrize("rpc", ["Tso", "GetRegion", "SwitchMode", "BatchCommands"])
def test_answers_without_a_place(rpc: str) -> None:
    """PD's answers and a few others have none."""
    assert region_errors.with_region_error(rpc, ERROR) is None
    assert not region_errors.can_carry_region_error(rpc)


def test_the_region_that_a_request_names() -> None:
    """It is in the context, in the SST's meta, or in a field of PD's requests; 0 when nowhere."""
    named = kvrpcpb_pb2.RawGetRequest(context=kvrpcpb_pb2.Context(region_id=5))
    of_sst = import_sstpb_pb2.DownloadRequest(sst=import_sstpb_pb2.SSTMeta(region_id=6))
    scattered = pdpb_pb2.ScatterRegionRequest(region=metapb_pb2.Region(id=7))
    by_id = pdpb_pb2.GetRegionByIDRequest(region_id=8)
    nowhere = [brpb_pb2.BackupRequest(), pdpb_pb2.GetMembersRequest(), iter(())]
    assert [region_errors.region_of(request) for request in (named, of_sst, scattered, by_id)] == [5, 6, 7, 8]
    assert [region_errors.region_of(request) for request in nowhere] == [0, 0, 0]
