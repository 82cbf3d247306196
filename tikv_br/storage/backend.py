"""A location in the form in which stores are told where to write and read files themselves."""

from __future__ import annotations

from tikv_br.cluster.pb import brpb_pb2, encryptionpb_pb2
from tikv_br.storage.credentials import chain, region_of
from tikv_br.storage.url import StorageLocation

_CIPHERS = {
    "aes128-ctr": encryptionpb_pb2.AES128_CTR,
    "aes192-ctr": encryptionpb_pb2.AES192_CTR,
    "aes256-ctr": encryptionpb_pb2.AES256_CTR,
}


KEY_IN_CLEAR = "the backup's key travels to the stores in clear, as the cluster is used without TLS"


def to_cipher_info(location: StorageLocation) -> brpb_pb2.CipherInfo:
    """How stores are to encrypt or decrypt what is at ``location``, with the key in clear: send it over TLS."""
    crypter = location.crypter
    if not crypter.encrypts:
        return brpb_pb2.CipherInfo(cipher_type=encryptionpb_pb2.PLAINTEXT)
    return brpb_pb2.CipherInfo(cipher_type=_CIPHERS[crypter.method], cipher_key=crypter.key_bytes)


def to_backend(location: StorageLocation, *, send_credentials: bool = True) -> brpb_pb2.StorageBackend:
    """The backend message for ``location``.

    With ``send_credentials`` (the Go tool's default) the message carries the credentials that this process uses, from
    the URL or the AWS chain, in clear: send it over TLS. Without, stores use their own. Local paths are the stores' own:
    they must be the same directory there as here. Raises `StorageDenied` when there are no credentials to send.
    """
    if location.scheme == "local":
        return brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=location.path))
    options = location.s3
    message = brpb_pb2.S3(
        endpoint=options.endpoint,
        region=region_of(options),
        bucket=location.bucket,
        prefix=location.path,
        storage_class=options.storage_class,
        sse=options.sse,
        sse_kms_key_id=options.sse_kms_key_id,
        force_path_style=options.path_style,
        provider=options.provider,
    )
    if send_credentials:
        now = chain(options)()
        message.access_key = now.access_key.reveal()
        message.secret_access_key = now.secret_access_key.reveal()
        message.session_token = now.session_token.reveal()
    return brpb_pb2.StorageBackend(s3=message)
