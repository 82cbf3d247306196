"""A container of Azure Blob Storage as an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from obstore.store import AzureStore

from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageUnreachable,
    UsageError,
)
from tikv_br.storage.cloud import OVERLOADED, CloudObjectStore, RequestFailure, refusal, server_message
from tikv_br.storage.credentials import AZURE_CREDENTIALS_HINT, azure_credentials
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, RetryConfig

_REASONS = {
    "AuthenticationFailed": "the account key or SAS token is wrong or has expired, or this machine's clock differs too much",
    "AuthorizationFailure": "the account key or SAS token is wrong, or the network rules of the account do not allow this machine",
    "AuthorizationPermissionMismatch": "the credentials lack the permission",
    "AuthorizationResourceTypeMismatch": "the SAS token is not for containers and objects",
    "AuthorizationServiceMismatch": "the SAS token is not for Blob Storage",
    "AuthorizationProtocolMismatch": "the SAS token requires https",
    "AuthorizationSourceIPMismatch": "the SAS token does not allow this machine's address",
    "InsufficientAccountPermissions": "the credentials lack the permission",
    "InvalidAuthenticationInfo": "the token or signature is not valid",
    "KeyBasedAuthenticationNotPermitted": "the account does not allow account keys",
    "NoAuthenticationInformation": "the request had no credentials",
    "PublicAccessNotPermitted": "the request had no credentials",
    "AccountIsDisabled": "the account is disabled",
    "BlobArchived": "the object is archived and must be rehydrated first",
}
_BAD_CONTAINER = {"InvalidResourceName", "OutOfRangeInput"}
_NO_CONTAINER = {"ContainerNotFound", "ContainerDisabled"}
_NO_CONTAINER_TEXT = "The specified container does not exist"
_TAKEN = {"BlobAlreadyExists", "ConditionNotMet"}
_NOT_NOW = {"ContainerBeingDeleted", "ServerBusy", "OperationTimedOut"}
_REFUSALS = {401, 403}
_NOT_FOUND = 404
_PRECONDITION_FAILED = 412
_INSUFFICIENT_STORAGE = 507


class AzureObjectStore(CloudObjectStore):
    """Objects in a container below a prefix. Deletions are sent as batches of one, as obstore has no other."""

    _CREDENTIALS_HINT = AZURE_CREDENTIALS_HINT

    def __init__(self, location: StorageLocation) -> None:
        super().__init__(location)
        self._credentials = azure_credentials(location.azure)

    @property
    def _endpoint(self) -> str:
        return self._location.azure.endpoint or f"https://{self._credentials.account}.blob.core.windows.net"

    def _open(self, client: ClientConfig, retries: RetryConfig) -> AzureStore:
        now = self._credentials
        config: AzureConfig = {"account_name": now.account, "endpoint": self._endpoint}
        if now.key:
            config |= {"account_key": now.key.reveal(), "credential_type": "access_key"}
        elif now.sas_token:
            config |= {"sas_key": now.sas_token.reveal(), "credential_type": "sas_token"}
        return AzureStore(
            self._location.bucket,
            prefix=self._location.path or None,
            config=config,
            client_options=client,
            retry_config=retries,
        )

    def _is_missing_object(self, failure: RequestFailure) -> bool:
        return not _lacks_container(failure)

    def _refusal(self, failure: RequestFailure, what: str, place: str) -> StorageError | UsageError:
        container = self._location.bucket
        if _lacks_container(failure):
            return StorageObjectMissing(
                f"container {container!r} does not exist at {self._endpoint}",
                hint="Create the container, or check the URL.",
            )
        if failure.code in _BAD_CONTAINER:
            return UsageError(
                f"{self._endpoint} refuses a name in {place}: {server_message(failure)}",
                hint="Check the container and the prefix in the storage URL: azure://CONTAINER/prefix.",
            )
        return refusal(_kind_of(failure), failure, _REASONS.get(failure.code, ""), what, place)


def _lacks_container(failure: RequestFailure) -> bool:
    return failure.code in _NO_CONTAINER or failure.message.startswith(_NO_CONTAINER_TEXT)


def _kind_of(failure: RequestFailure) -> type[StorageError]:
    status, code = failure.status, failure.code
    if status == _INSUFFICIENT_STORAGE:
        return StorageFull
    if code in _REASONS or status in _REFUSALS:
        return StorageDenied
    if status == _NOT_FOUND:
        return StorageObjectMissing
    if code in _TAKEN or status == _PRECONDITION_FAILED:
        return StorageConflict
    return StorageUnreachable if status in OVERLOADED or code in _NOT_NOW else StorageError
