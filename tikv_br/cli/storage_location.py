"""The storage flags as one location."""

from __future__ import annotations

from tikv_br.storage.url import S3Options, StorageLocation, parse


def storage_location(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    storage_class: str | None = None,
    sse: str | None = None,
    sse_kms_key_id: str | None = None,
    acl: str | None = None,
    provider: str | None = None,
    force_path_style: bool | None = None,
) -> StorageLocation:
    """The location of ``--storage`` and ``--s3.*``; what the URL says counts more. Raises `UsageError`."""
    options = S3Options(
        endpoint=endpoint or "",
        region=region or "",
        storage_class=storage_class or "",
        sse=sse or "",
        sse_kms_key_id=sse_kms_key_id or "",
        acl=acl or "",
        provider=provider or "",
        force_path_style=force_path_style,
    )
    return parse(url, options)
