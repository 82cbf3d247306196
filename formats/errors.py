"""Errors of the codecs.

The packages above turn these into their own errors, with the name of the file or flag.
"""

from __future__ import annotations


class FormatError(ValueError):
    """Base of all codec errors; the message has the problem and its position."""


class DamagedBytes(FormatError):
    """The bytes do not decode: cut, altered, or never of this format."""


class UnsupportedFormat(FormatError):
    """Well-formed, but of a version or kind that this code does not handle."""


class UnsortedKeys(FormatError):
    """Keys that must ascend strictly do not."""


class InvalidKeyText(FormatError):
    """A key given as text does not parse."""
