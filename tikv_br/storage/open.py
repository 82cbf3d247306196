"""Opens the object store at a location."""

from __future__ import annotations

from tikv_br.storage.base import ObjectStore
from tikv_br.storage.url import StorageLocation


def open_store(location: StorageLocation) -> ObjectStore:
    """The store at ``location``. Cheap, and silent: nothing is asked of the store before its first use.

    Raises `StorageDenied` when S3 credentials are found neither in the URL nor in the AWS credential chain, or Azure's account
    nowhere.
    """
    if location.scheme == "local":
        from tikv_br.storage.local import LocalObjectStore

        return LocalObjectStore(location)
    if location.scheme == "azure":
        from tikv_br.storage.clouds import AzureObjectStore

        return AzureObjectStore(location)
    if location.scheme == "gcs":
        from tikv_br.storage.clouds import GcsObjectStore

        return GcsObjectStore(location)
    from tikv_br.storage.clouds import S3ObjectStore

    return S3ObjectStore(location)
