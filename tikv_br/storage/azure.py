"""A container of Azure Blob Storage as an object store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from obstore.store import AzureStore

from tikv_br.errors import UsageError
from tikv_br.storage.cloud import CloudObjectStore
from tikv_br.storage.credentials import AZURE_CREDENTIALS_HINT, azure_credentials
from tikv_br.storage.request_failure import RequestFailure, server_message
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, RetryConfig

_NO_CONTAINER = {"ContainerNotFound", "ContainerDisabled"}
_NO_CONTAINER_TEXT = "The specified container does not exist"


class AzureObjectStore(CloudObjectStore):
    """Objects in a container below a prefix. Deletions are sent as batches of one, as obstore has no other."""

    _CREDENTIALS_HINT = AZURE_CREDENTIALS_HINT
    _BUCKET = "container"
    _REASONS: ClassVar[Mapping[str, str]] = {
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
    _TAKEN = frozenset({"BlobAlreadyExists", "ConditionNotMet"})
    _BUSY = frozenset({"ContainerBeingDeleted", "ServerBusy", "OperationTimedOut"})
    _BAD_NAMES = frozenset({"InvalidResourceName", "OutOfRangeInput"})
    _IGNORED_VARIABLES = frozenset(
        {
            "AZURE_CONTAINER_NAME",
            "AZURE_DISABLE_TAGGING",
            "AZURE_ENDPOINT",
            "AZURE_SKIP_SIGNATURE",
            "AZURE_STORAGE_ENCRYPTION_KEY",
            "AZURE_STORAGE_ENDPOINT",
            "AZURE_STORAGE_USE_EMULATOR",
            "AZURE_USE_FABRIC_ENDPOINT",
        }
    )

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
        elif now.has_client_secret:
            config["credential_type"] = "client_secret"
        return AzureStore(
            self._location.bucket,
            prefix=self._location.path or None,
            config=config,
            client_options=client,
            retry_config=retries,
        )

    def _is_missing_object(self, failure: RequestFailure) -> bool:
        return not self._lacks_bucket(failure)

    def _lacks_bucket(self, failure: RequestFailure) -> bool:
        return failure.code in _NO_CONTAINER or failure.message.startswith(_NO_CONTAINER_TEXT)

    def _bad_name(self, failure: RequestFailure, place: str) -> UsageError:
        return UsageError(
            f"{self._endpoint} refuses a name in {place}: {server_message(failure)}",
            hint="Check the container and the prefix in the storage URL: azure://CONTAINER/prefix.",
        )
