"""The flags beside a storage URL, and the place that they name together."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from tikv_br.cli import options
from tikv_br.cli.option_groups import OptionGroup
from tikv_br.cli.secret_file import secret_of
from tikv_br.storage.crypter import Crypter
from tikv_br.storage.url import S3Options, StorageLocation, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Flags(OptionGroup):
    """``--s3.*``."""

    s3_endpoint: options.S3EndpointOption = None
    s3_region: options.S3RegionOption = None
    s3_storage_class: options.S3StorageClassOption = None
    s3_sse: options.S3SseOption = None
    s3_sse_kms_key_id: options.S3SseKmsKeyOption = None
    s3_acl: options.S3AclOption = None
    s3_provider: options.S3ProviderOption = None
    s3_ca: options.S3CaOption = None
    s3_force_path_style: options.S3PathStyleOption = None

    def locate(self, url: str) -> StorageLocation:
        """The place that a URL and the flags name; what the URL says counts more. Raises `UsageError`."""
        return parse(
            url,
            S3Options(
                endpoint=self.s3_endpoint or "",
                region=self.s3_region or "",
                storage_class=self.s3_storage_class or "",
                sse=self.s3_sse or "",
                sse_kms_key_id=self.s3_sse_kms_key_id or "",
                acl=self.s3_acl or "",
                provider=self.s3_provider or "",
                ca=self.s3_ca or os.environ.get("AWS_CA_BUNDLE", ""),
                force_path_style=self.s3_force_path_style,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFlags(S3Flags):
    """``--s3.*`` and ``--crypter.*``."""

    crypter_method: options.CrypterMethodOption = ""
    crypter_key: options.CrypterKeyOption = ""
    crypter_key_file: options.CrypterKeyFileOption = ""

    def locate(self, url: str) -> StorageLocation:
        """The place, with the key of what lies there. Raises `UsageError`."""
        key = secret_of("--crypter.key", self.crypter_key, self.crypter_key_file)
        return replace(S3Flags.locate(self, url), crypter=Crypter.of(self.crypter_method, key))
