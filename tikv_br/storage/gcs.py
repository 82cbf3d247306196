"""A bucket of Google Cloud Storage as an object store, by its XML API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from obstore.store import GCSStore

from tikv_br.storage.cloud import CloudObjectStore
from tikv_br.storage.credentials import gcs_credentials
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSConfig, RetryConfig

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
    """Of service accounts, because `gcs_credentials` reads them."""

    def __init__(self, location: StorageLocation) -> None:
        super().__init__(location)
        self._key = gcs_credentials(location.gcs)

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
