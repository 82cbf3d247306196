"""Ranges of user keys and of RPC keys, across keyspaces."""

from __future__ import annotations

from formats.api_version import ApiVersion
from formats.keys import PREFIX_SIZE, KeyCodec
from tikv_br.backupset.coverage import KeyRange
from tikv_br.errors import BackupUnsupported


def codec_of(api_version: ApiVersion, span: KeyRange) -> KeyCodec:
    """The codec of the keyspace that an RPC range lies in. Raises `BackupUnsupported` when it spans several."""
    if api_version is not ApiVersion.V2:
        return KeyCodec(api_version)
    codec = KeyCodec(api_version, int.from_bytes(span.start[1:PREFIX_SIZE], "big"))
    if not KeyRange(*codec.rpc_range(b"", b"")).contains(span):
        raise BackupUnsupported(f"{span} lies in more than one keyspace")
    return codec


def user_range(codec: KeyCodec, span: KeyRange) -> tuple[bytes, bytes]:
    """The user keys [start, end) of an RPC range in the codec's keyspace; an empty end is no end."""
    end = b"" if span.end == codec.rpc_range(b"", b"")[1] else codec.user_key(span.end)
    return codec.user_key(span.start), end
