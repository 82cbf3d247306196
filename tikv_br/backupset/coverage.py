"""Checks that the parts of a backup cover its ranges without gaps or overlaps, and how much each region held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from tikv_br.errors import BackupUnsupported, CoverageError, NothingMatched, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.formats.json_types import Hex
from tikv_br.formats.keys.codec import PREFIX_SIZE, KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.formats.keys.text import show_both

RANGES_SHOWN = 3
"""Ranges that a message names."""


def codec_of(api_version: ApiVersion, span: KeyRange, mode: KeyMode = KeyMode.RAW) -> KeyCodec:
    """The codec of the keyspace that an RPC range lies in. Raises `BackupUnsupported` when it spans several."""
    if api_version is not ApiVersion.V2:
        return KeyCodec(api_version, mode=mode)
    codec = KeyCodec(api_version, int.from_bytes(span.start[1:PREFIX_SIZE], "big"), mode)
    if not codec.rpc_range().contains(span):
        raise BackupUnsupported(f"{span} spans more than one keyspace")
    return codec


def keyspace_codec(
    api_version: ApiVersion, keyspace_id: int, option: str, hint: str | None = None, mode: KeyMode = KeyMode.RAW
) -> KeyCodec:
    """The codec of a keyspace that the user chose with an option. Raises `UsageError` if there can be no such keyspace."""
    try:
        return KeyCodec(api_version, keyspace_id, mode)
    except UnsupportedFormat as error:
        raise UsageError(f"{option}: {error}", hint=hint) from None


def keyspaces_in(api_version: ApiVersion, ranges: Iterable[KeyRange]) -> tuple[int, ...]:
    """The ids of the keyspaces that RPC ranges begin in; none before API V2."""
    if api_version is not ApiVersion.V2:
        return ()
    return tuple(sorted({int.from_bytes(each.start[1:PREFIX_SIZE], "big") for each in ranges}))


def shown_keyspaces(ids: Sequence[int], names: Sequence[str]) -> str:
    """Keyspaces for people: names and ids, or the ids of those without a recorded name."""
    named = names or ("",) * len(ids)
    return ", ".join(f"{name} ({id_})" if name else str(id_) for id_, name in zip(ids, named, strict=False))


def nothing_matched(
    place: str, api_version: ApiVersion, spans: Sequence[KeyRange], mode: KeyMode = KeyMode.RAW
) -> NothingMatched:
    """The error for RPC ranges without a row: it shows their user keys as text and in hex."""
    return NothingMatched(f"{place} has no row {describe_ranges(api_version, spans, mode)}")


def describe_ranges(api_version: ApiVersion, spans: Sequence[KeyRange], mode: KeyMode = KeyMode.RAW) -> str:
    """The first RPC ranges for messages, by user keys as text and in hex."""
    texts = []
    for span in spans[:RANGES_SHOWN]:
        codec = codec_of(api_version, span, mode)
        keys = codec.user_range(span)
        start, end = show_both(keys.start), show_both(keys.end)
        where = f" in keyspace {codec.keyspace_id}" if codec.is_v2 else ""
        texts.append(f"from {start or 'the start'} to {end or 'the end'}{where}")
    more = len(spans) - len(texts)
    return ", ".join([*texts, f"and {more:,} more ranges"] if more else texts)


def require_coverage(wanted: Sequence[KeyRange], parts: Iterable[KeyRange]) -> None:
    """Raise `CoverageError` unless ``parts`` are ``wanted`` cut into pieces: no gap, no overlap, nothing outside."""
    ordered = sorted(parts)
    require_disjoint(ordered)
    for part in ordered:
        if part.is_empty or not any(whole.contains(part) for whole in wanted):
            raise CoverageError(f"{part} is outside the ranges to back up")
    for whole in wanted:
        if not whole.is_empty and (missing := gaps(whole, ordered)):
            raise CoverageError(f"no file covers {missing[0]} (first of {len(missing)} gaps)")


def require_disjoint(parts: Iterable[KeyRange]) -> None:
    """Raise `CoverageError` when two parts have a key in common."""
    previous: KeyRange | None = None
    for part in sorted(part for part in parts if not part.is_empty):
        if previous is not None and (not previous.end or part.start < previous.end):
            raise CoverageError(f"{previous} and {part} overlap")
        previous = part


MAX_PARTS = 1000
"""Maximum number of parts in a manifest; neighbours are merged if there are more."""


class RegionPart(Struct, frozen=True):
    """Size of one region, or of several neighbouring ones, when it was backed up. RPC keys, as in the files."""

    start: Hex
    end: Hex
    """Exclusive; ``b""`` = unbounded."""
    total_kvs: int
    total_bytes: int
    """Keys and values, as in the files."""
    regions: int = 1
    """0 = not known."""


def merge_regions(parts: Sequence[RegionPart], most: int = MAX_PARTS) -> tuple[RegionPart, ...]:
    """Parts in key order, with neighbours merged if there are more than ``most``."""
    ordered = sorted(parts, key=lambda part: part.start)
    size = -(-len(ordered) // most) or 1
    return tuple(_merge_parts(ordered[at : at + size]) for at in range(0, len(ordered), size))


class RegionList:
    """Takes the parts of any number of regions, in key order, and holds at most twice as many as a manifest has."""

    def __init__(self, most: int = MAX_PARTS) -> None:
        self._most = most
        self._parts: list[RegionPart] = []
        self._each = 1
        """Parts that one of the list was made of."""
        self._rest: list[RegionPart] = []

    def add(self, part: RegionPart) -> None:
        self._rest.append(part)
        if len(self._rest) < self._each:
            return
        self._parts.append(_merge_parts(self._rest))
        self._rest = []
        if len(self._parts) == 2 * self._most:
            self._parts = list(merge_regions(self._parts, self._most))
            self._each *= 2

    def merged(self) -> tuple[RegionPart, ...]:
        """The parts, as `merge_regions` makes them."""
        return merge_regions([*self._parts, *self._rest], self._most)


def _merge_parts(parts: Sequence[RegionPart]) -> RegionPart:
    if len(parts) == 1:
        return parts[0]
    return RegionPart(
        parts[0].start,
        parts[-1].end,
        sum(part.total_kvs for part in parts),
        sum(part.total_bytes for part in parts),
        sum(part.regions for part in parts) if all(part.regions for part in parts) else 0,
    )
