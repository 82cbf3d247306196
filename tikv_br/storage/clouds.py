"""What is special to each cloud: containers of Azure, buckets of Google Cloud Storage (by its XML API) and of S3 as object stores."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from tikv_br.errors import StorageDenied, StorageError, UsageError
from tikv_br.storage.cloud import CONDITIONAL_CONFLICT, CloudObjectStore
from tikv_br.storage.credentials import (
    AZURE_CREDENTIALS_HINT,
    NO_S3_CREDENTIALS,
    azure_credentials,
    credential_source,
    gcs_credentials,
    region_of,
    to_obstore_provider,
)
from tikv_br.storage.request_failure import MOVED, RequestFailure, server_message
from tikv_br.storage.url import StorageLocation, expand_home

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config


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


GOOGLE = "https://storage.googleapis.com"


class GcsObjectStore(CloudObjectStore):
    """Objects in a bucket below a prefix."""

    _CREDENTIALS_HINT = (
        "Set GOOGLE_APPLICATION_CREDENTIALS or --gcs.credentials-file to a key file, run `gcloud auth application-default login`, "
        "or run on a machine with a service account."
    )
    _REASONS: ClassVar[Mapping[str, str]] = {
        "AccessDenied": "the credentials lack the permission",
        "AuthenticationRequired": "the access token is not valid",
        "ExpiredToken": "the access token has expired",
        "InvalidSecurity": "the credentials are not valid",
        "AccountProblem": "the account is disabled",
        "UserProjectAccountProblem": "the project's billing account is disabled",
    }
    _IGNORED_VARIABLES = frozenset(
        {
            "GOOGLE_BASE_URL",
            "GOOGLE_BEARER_TOKEN",
            "GOOGLE_BUCKET",
            "GOOGLE_BUCKET_NAME",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SKIP_SIGNATURE",
            "SERVICE_ACCOUNT",
        }
    )
    """Variables of service accounts, because `gcs_credentials` reads them."""

    def __init__(self, location: StorageLocation) -> None:
        super().__init__(location)
        self._key = gcs_credentials(location.gcs)
        # Google's own listings need no proof: its documents of the XML API have `start-after`, which obstore sends.
        self._lists_like = "Google" if location.gcs.endpoint else ""

    @property
    def _endpoint(self) -> str:
        return self._location.gcs.endpoint or GOOGLE

    def _open(self, client: ClientConfig, retries: RetryConfig) -> GCSStore:
        config: GCSConfig = {"base_url": self._endpoint}
        if self._key:
            config["service_account_key"] = self._key.reveal()
        return GCSStore(
            self._location.bucket,
            prefix=self._location.path or None,
            config=config,
            client_options=client,
            retry_config=retries,
        )


_WRONG_REGION = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
}


class S3ObjectStore(CloudObjectStore):
    """Objects in an S3 bucket below a prefix."""

    _CREDENTIALS_HINT = NO_S3_CREDENTIALS
    _REASONS: ClassVar[Mapping[str, str]] = {
        "InvalidAccessKeyId": "the access key is unknown",
        "XAdminUserNotFound": "the access key is unknown",
        "SignatureDoesNotMatch": "the secret access key does not match the access key",
        "ExpiredToken": "the session token has expired",
        "InvalidToken": "the session token is not valid",
        "RequestTimeTooSkewed": "this machine's clock differs too much from the server's",
        "AccessDenied": "the credentials lack the permission",
        "AllAccessDisabled": "access to the bucket is disabled",
        "InvalidObjectState": "the object is archived and must be restored first",
    }
    _FULL = frozenset(
        {"QuotaExceeded", "StorageFull", "XMinioStorageFull", "InsufficientStorage", "QuotaExceededException"}
    )
    _TAKEN = frozenset({"PreconditionFailed"})
    _BUSY = frozenset({CONDITIONAL_CONFLICT})
    _lists_like = "S3"
    _IGNORED_VARIABLES = frozenset(
        {
            "AWS_BUCKET",
            "AWS_BUCKET_NAME",
            "AWS_CHECKSUM_ALGORITHM",
            "AWS_CONDITIONAL_PUT",
            "AWS_COPY_IF_NOT_EXISTS",
            "AWS_DISABLE_BULK_DELETE",
            "AWS_DISABLE_TAGGING",
            "AWS_ENDPOINT",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_REQUEST_PAYER",
            "AWS_S3_EXPRESS",
            "AWS_SERVER_SIDE_ENCRYPTION",
            "AWS_SKIP_SIGNATURE",
            "AWS_SSE_BUCKET_KEY_ENABLED",
            "AWS_SSE_CUSTOMER_KEY_BASE64",
            "AWS_SSE_KMS_KEY_ID",
            "AWS_UNSIGNED_PAYLOAD",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
        }
    )

    def __init__(self, location: StorageLocation) -> None:
        super().__init__(location)
        self._provider = to_obstore_provider(credential_source(location.s3))
        self._region = region_of(location.s3)
        self._authorities = _authorities(location.s3.ca) if location.s3.ca else b""

    @property
    def _endpoint(self) -> str:
        return self._location.s3.endpoint or f"Amazon S3 in {self._region}"

    def _open(self, client: ClientConfig, retries: RetryConfig) -> S3Store:
        if self._authorities:
            client["root_certificate"] = self._authorities
        return S3Store(
            self._location.bucket,
            prefix=self._location.path or None,
            config=self._config(),
            client_options=client,
            retry_config=retries,
            credential_provider=self._provider,
        )

    def _config(self) -> S3Config:
        options = self._location.s3
        config: S3Config = {
            "region": self._region,
            "virtual_hosted_style_request": not options.path_style,
            "disable_bulk_delete": True,  # single deletions need no further right and work at every provider
        }
        if options.endpoint:
            config["endpoint"] = options.endpoint if options.path_style else _with_bucket(self._location)
        if options.sse:
            config["server_side_encryption"] = options.sse
        if options.sse_kms_key_id:
            config["sse_kms_key_id"] = options.sse_kms_key_id
        return config

    def _refusal(self, failure: RequestFailure, what: str, place: str) -> StorageError | UsageError:
        if failure.code in _WRONG_REGION or (failure.status == MOVED and not self._location.s3.endpoint):
            right = f"in region {failure.region!r}, not" if failure.region else "not in region"
            hint = f"Set --s3.region {failure.region}." if failure.region else "Set --s3.region to the bucket's region."
            return StorageDenied(f"bucket {self._location.bucket!r} is {right} {self._region!r}", hint=hint)
        return super()._refusal(failure, what, place)


def _with_bucket(location: StorageLocation) -> str:
    """The endpoint with the bucket in its host name, as obstore wants it without path style."""
    parts = urlsplit(location.s3.endpoint)
    return f"{parts.scheme}://{location.bucket}.{parts.netloc}"


def _authorities(path: str) -> bytes:
    try:
        pem = Path(expand_home(path)).read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except OSError as error:
        raise UsageError(f"--s3.ca: cannot read {path}: {error.strerror}") from None
    except (ssl.SSLError, ValueError):
        raise UsageError(
            f"--s3.ca: {path} contains no certificates", hint="Pass a PEM file of the certificate authority."
        ) from None
    return pem
