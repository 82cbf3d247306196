"""Types of fields of records that JSON has as text. For a type checker, and at run time as values, they are those that the text stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tikv_br.formats.api_version import ApiVersion

if TYPE_CHECKING:
    Hex = bytes
    ApiLabel = ApiVersion
else:

    class _Text(type):
        """A type with the instances of `kind`, which `parse` makes of the text."""

        def __instancecheck__(cls, value: Any) -> bool:  # noqa: ANN401 - anything may be asked about
            return isinstance(value, cls.kind)

    class Hex(metaclass=_Text):
        """Bytes in hex."""

        kind = bytes
        text = "bytes in hex"

        parse = bytes.fromhex

    class ApiLabel(metaclass=_Text):
        """The label of an API version."""

        kind = ApiVersion
        text = "an API version"
        parse = ApiVersion.from_label
