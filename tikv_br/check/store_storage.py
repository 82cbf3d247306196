"""Whether stores accept the storage, as backups that they write and restores that they read themselves need it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from tikv_br.check.probe import ProbeContext, ProbeOutcome, ProbeSkipped, listed, ok, warn
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.topology import StoreState
from tikv_br.errors import ClusterUnreachable, StorageDenied
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.storage.credentials import to_backend

_WITHOUT_STORES = "`backup raw --engine scan` and `restore raw --via upload` work all the same."
_NOT_BUILT_IN = "bad storage backend"
"""Error text of a TiKV that was built without a cloud."""


def probe_store_storage(context: ProbeContext) -> ProbeOutcome:
    """Each store opens the storage for the backup of one key, which does not exist: so nothing is written.

    Stores do not contact a cloud before they have something to write, so whether they reach it is not known.
    """
    options = context.options
    if options.storage is None:
        raise ProbeSkipped("no --storage")
    _ = context.store  # skips the probe if the storage does not answer
    cluster = context.cluster
    try:
        backend = to_backend(options.storage, send_credentials=options.send_credentials)
    except StorageDenied as error:
        return warn(error.message, f"{error.hint} {_WITHOUT_STORES}")
    request = request_of_nothing(cluster, backend)
    answers: dict[str, str] = {}
    for store in cluster.pd.stores():
        if not store.serves or store.state is not StoreState.UP:
            continue
        client = cluster.store(store.id)
        try:
            found = list(client.backup(request, timeout=client.request_timeout))
        except ClusterUnreachable:  # another probe reports it
            continue
        # An error of a region comes after the storage was opened.
        errors = [
            each.error.msg for each in found if each.HasField("error") and not each.error.HasField("region_error")
        ]
        answers[f"store {store.id}"] = errors[0] or "an error without a message" if errors else ""
    return judge_answers(answers, options.storage.scheme)


def request_of_nothing(cluster: Cluster, backend: brpb_pb2.StorageBackend) -> brpb_pb2.BackupRequest:
    """A backup of a range that contains one random key and no row; a range without any key would crash a store."""
    key = KeyCodec(cluster.api_version).rpc_key(b"tikv-br-check-" + secrets.token_bytes(16))
    return brpb_pb2.BackupRequest(
        cluster_id=cluster.cluster_id,
        start_key=key,
        end_key=key + b"\0",
        is_raw_kv=True,
        cf="default",
        dst_api_version=kvrpcpb_pb2.APIVersion.ValueType(cluster.api_version),
        storage_backend=backend,
    )


def judge_answers(answers: Mapping[str, str], scheme: str) -> ProbeOutcome:
    """Judge the errors of stores, by store; an empty one = it opened the storage."""
    refused = {store: error for store, error in answers.items() if error}
    if not answers:
        raise ProbeSkipped("no store answers")
    if not refused:
        return ok(f"opened by {len(answers)} {'store' if len(answers) == 1 else 'stores'}")
    seen = listed([f"{store} cannot open it: {error}" for store, error in refused.items()], 2)
    if any(_NOT_BUILT_IN in error for error in refused.values()):
        return warn(seen, f"These stores were built without {scheme}. {_WITHOUT_STORES}")
    if scheme == "local":
        return warn(
            seen, f"The path must be the same shared directory on the machines of all stores. {_WITHOUT_STORES}"
        )
    return warn(seen, f"Check the credentials, or those of the stores' own. {_WITHOUT_STORES}")
