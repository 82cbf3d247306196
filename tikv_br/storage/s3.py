"""An S3 bucket as an object store."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from obstore.store import S3Store

from tikv_br.errors import StorageDenied, StorageError, UsageError
from tikv_br.storage.cloud import CONDITIONAL_CONFLICT, CloudObjectStore
from tikv_br.storage.cloud_options import expand_home
from tikv_br.storage.credentials import NO_S3_CREDENTIALS, credential_source, region_of, to_obstore_provider
from tikv_br.storage.request_failure import MOVED, RequestFailure
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config


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
    _LISTS_BEHIND = True
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
