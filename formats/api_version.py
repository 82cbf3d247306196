"""The three API versions of RawKV."""

from __future__ import annotations

import enum

from tikv_br.formats.errors import UnsupportedFormat

V3_NUMBER = 3
V3_REFUSED = "API V3 (namespaces) is not supported: tikv-br knows API V1, V1TTL and V2"


class ApiVersion(enum.IntEnum):
    """Numbers as in ``kvrpcpb.APIVersion``."""

    V1 = 0
    V1TTL = 1
    V2 = 2

    @property
    def label(self) -> str:
        """The flag's form: ``v1``, ``v1ttl`` or ``v2``."""
        return self.name.lower()

    @property
    def has_ttl(self) -> bool:
        return self is not ApiVersion.V1

    @classmethod
    def from_label(cls, label: str) -> ApiVersion:
        """Parse ``v1``, ``v1ttl`` or ``v2``, in any case. Raises `UnsupportedFormat`."""
        try:
            return cls[label.strip().upper()]
        except KeyError:
            if label.strip().lower() == "v3":
                raise UnsupportedFormat(V3_REFUSED) from None
            raise UnsupportedFormat(f"unknown API version {label!r}: v1, v1ttl or v2") from None
