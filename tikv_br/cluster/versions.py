"""Versions of TiKV: how they are compared, and which one has which capability.

`CAPABILITIES` is the only table of versions. Operations, ``tikv-br check`` and the table in ``docs/compatibility.md`` use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from tikv_br.errors import ClusterUnfit

if TYPE_CHECKING:
    from tikv_br.cluster.topology import Store

_FINAL = ((True, 0, "~"),)  # after all letters: a release is newer than its pre-releases
_VERSION = re.compile(r'\s*"?v?(\d+)\.(\d+)\.(\d+)(?:-([A-Za-z][0-9A-Za-z.-]*))?')


class Version(NamedTuple):
    """A version in semantic order: ``9.0.0-beta.2`` comes before ``9.0.0``. A build such as ``6.5.4-20230901`` counts as ``6.5.4``."""

    major: int
    minor: int
    patch: int = 0
    pre: tuple[tuple[bool, int, str], ...] = _FINAL
    """Parts of the pre-release: whether it is a text, its number, its text."""

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read ``6.5.4``, ``v9.0.0-beta.2`` or ``"8.5.7"`` with quotes. Raises `ClusterUnfit`."""
        found = _VERSION.match(text)
        if found is None:
            raise ClusterUnfit(f"cannot parse the version {text!r}: expected a version such as 6.1.0")
        major, minor, patch = (int(found[group]) for group in (1, 2, 3))
        if found[4] is None:
            return cls(major, minor, patch)
        parts = ((False, int(part), "") if part.isdigit() else (True, 0, part) for part in re.split(r"[.-]", found[4]))
        return cls(major, minor, patch, tuple(parts))

    def __str__(self) -> str:
        pre = "" if self.pre == _FINAL else "-" + ".".join(text or str(number) for _, number, text in self.pre)
        return f"{self.major}.{self.minor}.{self.patch}{pre}"


class Capability(Struct, frozen=True):
    """Something that stores can do from a version on."""

    name: str
    """Name that starts messages."""
    used_by: str
    since: Version | None
    """None: no release has it."""
    older: str = ""
    """Consequence on older versions; ``""`` = `require` refuses them."""
    patches: tuple[Version, ...] = ()
    """Patch releases that have it although their line is older than `since`."""
    hint: str = ""
    """Alternative to an upgrade."""

    def needed(self, version: Version) -> Version | None:
        """The first version that has it, of the same line if there is one: 6.5.4 for 6.5.1."""
        return next((patch for patch in self.patches if patch[:2] == version[:2]), self.since)

    @property
    def versions(self) -> str:
        """The first versions, for people: ``7.3.0, 7.1.2, 6.5.4``."""
        return "none yet" if self.since is None else ", ".join(map(str, (self.since, *self.patches)))


def supports(version: Version | str, capability: Capability) -> bool:
    """Return whether a version has a capability. Raises `ClusterUnfit` for an invalid version."""
    known = Version.parse(version) if isinstance(version, str) else version
    needed = capability.needed(known)
    return needed is not None and known >= needed


_ROW_PROPERTIES = Version(6, 4)
"""First version whose files have properties about their rows, but see `EXPIRY_PROPERTIES`."""


def lacks_expiry(version: str) -> bool:
    """Return whether files have properties about rows, but not about expiry (API V2); False for an invalid version."""
    try:
        known = Version.parse(version)
    except ClusterUnfit:
        return False
    return known >= _ROW_PROPERTIES and not supports(known, EXPIRY_PROPERTIES)


_SKIP = "If you know that this version works, pass --skip-version-check."
OLDEST = Version(5, 4)
"""Older stores are refused."""
NEWEST_TRIED = Version.parse("9.0.0-beta.2")
"""The newest version that tikv-br was run with; newer ones cause a notice."""

RAW = Capability("API V1 or V1TTL", "raw commands, backup by scan, export", OLDEST)
API_V2 = Capability("API V2", "all commands", Version(6, 2))
WRITES = Capability("writing many rows", "restore, load, and sync as target", Version(6, 1))
STORE_BACKUP = Capability("a backup by stores", "`backup --engine store`", Version(6, 1), hint="Pass --engine scan.")
TXN_BACKUP = Capability("a backup of transactional data", "`backup txn`", Version(6, 1))
CONVERSION = Capability(
    "a conversion of API versions", "`--dst-api-version`", Version(6, 1), hint="Leave out --dst-api-version."
)
CHECKSUMS = Capability(
    "RawChecksum",
    "restore, load, diff, drill, `verify --level restore`, `backup --checksum`",
    Version(6, 1, 1),
    hint="Some commands do without: restore with --no-checksum, backup without --checksum.",
)
FEED = Capability("a change feed", "sync, log, changefeed, capture", Version(6, 2))
WRITE_DEADLINE = Capability(
    "the deadline of raw writes",
    "sync, capture",
    Version(6, 3),
    "a store may execute a request late, after its sender has stopped waiting; a notice warns of it",
)
KEYSPACE_NAMES = Capability("names of keyspaces (PD)", "`--keyspace NAME`", Version(6, 3), "PD refuses; pass the id")
EXPIRY_PROPERTIES = Capability(
    "expiry in the properties of SSTs",
    "backup by stores, V1TTL and V2",
    Version(7, 3),
    "the files are read to find out what expires",
    patches=(Version(7, 1, 2), Version(6, 5, 4)),
)
MULTIPLEXED_FEED = Capability(
    "one feed stream for many regions",
    "sync, log, changefeed, capture",
    Version(7, 3),
    "one stream per store; if one region fails, the store scans its other regions again, too",
)
CLUSTER_ID_CHECK = Capability(
    "refusal of requests for another cluster",
    "all commands",
    Version(8, 0),
    "only PD's answers show that an address now belongs to another cluster",
)
TXN_REWRITE = Capability(
    "rewriting the keys of transactions",
    "`restore txn` into another keyspace",
    Version(7, 1),
    hint="Pass --via upload.",
)
LIMIT_TTL = Capability(
    "a download limit that expires",
    "`restore --ratelimit`",
    None,
    "after a restore was killed, stores keep the limit until the next restore or their restart",
)
CAPABILITIES = (
    RAW,
    API_V2,
    WRITES,
    STORE_BACKUP,
    TXN_BACKUP,
    CONVERSION,
    CHECKSUMS,
    FEED,
    WRITE_DEADLINE,
    KEYSPACE_NAMES,
    EXPIRY_PROPERTIES,
    MULTIPLEXED_FEED,
    CLUSTER_ID_CHECK,
    TXN_REWRITE,
    LIMIT_TTL,
)
OF_V2 = (API_V2, FEED, KEYSPACE_NAMES, MULTIPLEXED_FEED)
"""Capabilities that no cluster of API V1 or V1TTL uses."""


def require(stores: Iterable[Store], capability: Capability) -> None:
    """Raise `ClusterUnfit`, with store, version and the version needed, if one of these stores lacks the capability."""
    for store in stores:
        try:
            version = Version.parse(store.version)
        except ClusterUnfit as error:
            raise ClusterUnfit(f"store {store.id} ({store.address}): {error.message}", hint=_SKIP) from None
        if not supports(version, capability):
            raise ClusterUnfit(
                f"{capability.name} needs TiKV {capability.needed(version)} or newer; store {store.id} ({store.address}) "
                f"has version {store.version}",
                hint=" ".join(filter(None, ("Upgrade the store.", capability.hint, _SKIP))),
            )


def notices(stores: Iterable[Store], *, skipped: bool = False) -> list[str]:
    """Return notices for the operator about these versions, each once per process."""
    found = []
    if skipped:
        names = ", ".join(sorted({store.version for store in stores}))
        found.append(f"--skip-version-check: the versions of the stores ({names}) were not checked")
    else:
        newer = {str(known) for store in stores if (known := Version.parse(store.version)) > NEWEST_TRIED}
        found += [
            f"TiKV {each} is newer than {NEWEST_TRIED}, the newest version that tikv-br was tried with"
            for each in sorted(newer)
        ]
    return found


def shortcomings(stores: Iterable[Store], capability: Capability) -> list[str]:
    """Return the consequences of a missing capability, one for each version of these stores that lacks it."""
    found = sorted({Version.parse(store.version) for store in stores})
    return [
        f"TiKV {version} lacks {capability.name}, which needs {capability.needed(version)}: {capability.older}"
        for version in found
        if not supports(version, capability)
    ]
