"""Conversions and feature gates."""

from __future__ import annotations

import itertools

import pytest

from tikv_br.dataflow.options import Loss, require_conversion
from tikv_br.errors import ConversionUnsupported
from tikv_br.formats.api_version import ApiVersion

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
LOSES = {(V1TTL, V1): "ttl", (V2, V1): "ttl,ts,keyspace", (V2, V1TTL): "ts,keyspace"}
"""All that lose anything, of nine."""


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ApiVersion, ApiVersion)))
def test_a_conversion_that_loses_something_must_be_allowed_all_of_it(source: ApiVersion, target: ApiVersion) -> None:
    """Six of the nine pairs lose nothing; the others name versions, what would be lost and is not allowed, and the whole flag."""
    lost = LOSES.get((source, target), "")
    if not lost:
        require_conversion(source, target)
        return
    needed = {Loss(word) for word in lost.split(",")}
    require_conversion(source, target, needed)
    for allowed in ((), set(Loss) - {min(needed)}):
        with pytest.raises(ConversionUnsupported) as raised:
            require_conversion(source, target, allowed)
        also = "also " if needed & set(allowed) else ""
        assert f"API {source.label} as API {target.label} {also}loses" in raised.value.message
        for loss in Loss:
            assert (f"{loss.meaning} ({loss.value})" in raised.value.message) == (loss in needed - set(allowed))
        assert f"--allow-loss {lost}" in raised.value.hint
