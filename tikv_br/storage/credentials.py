"""Where S3 credentials and the region come from: the URL first, then the AWS chain (environment, profile, instance)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tikv_br.errors import StorageDenied
from tikv_br.storage.secret import SecretText
from tikv_br.storage.url import DEFAULT_REGION, S3Options

if TYPE_CHECKING:
    from obstore.store import S3Credential

CHAIN_TTL = timedelta(minutes=5)
"""How long an answer of the chain is used before it is asked again; it renews expiring credentials itself in time."""

_NO_CREDENTIALS = "Set AWS_PROFILE, or both AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; or give both in the URL: access-key, secret-access-key."


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """One set of credentials."""

    access_key: SecretText
    secret_access_key: SecretText
    session_token: SecretText


def chain(options: S3Options) -> Callable[[], S3Credentials]:
    """How to get credentials now and later. Raises `StorageDenied` when there are none, at the call or later."""
    if options.access_key:
        fixed = S3Credentials(options.access_key, options.secret_access_key, options.session_token)
        return lambda: fixed
    return _aws_chain()


def obstore_provider(source: Callable[[], S3Credentials]) -> Callable[[], S3Credential]:
    """The form in which obstore asks for credentials."""

    def provide() -> S3Credential:
        now = source()
        return {
            "access_key_id": now.access_key.reveal(),
            "secret_access_key": now.secret_access_key.reveal(),
            "token": now.session_token.reveal() or None,
            "expires_at": datetime.now(UTC) + CHAIN_TTL,
        }

    return provide


def region_of(options: S3Options) -> str:
    """The region: as said, else as the AWS environment or profile says, else the Go tool's default."""
    if options.region:
        return options.region
    import boto3

    return boto3.Session().region_name or DEFAULT_REGION


def _aws_chain() -> Callable[[], S3Credentials]:
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        found = boto3.Session().get_credentials()
    except BotoCoreError as error:  # e.g. a profile that does not exist
        raise StorageDenied(f"no S3 credentials: {error}", hint=_NO_CREDENTIALS) from None
    if found is None:
        raise StorageDenied("no S3 credentials found", hint=_NO_CREDENTIALS)
    credentials = found

    def now() -> S3Credentials:
        try:
            frozen = credentials.get_frozen_credentials()
        except BotoCoreError as error:
            raise StorageDenied(f"the S3 credentials cannot be renewed: {error}", hint=_NO_CREDENTIALS) from None
        return S3Credentials(*(SecretText(part or "") for part in (frozen.access_key, frozen.secret_key, frozen.token)))

    return now
