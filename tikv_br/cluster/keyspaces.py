"""Keyspaces of clusters: their names, and which one of another cluster is meant.

PD gives each cluster's keyspaces ids of their own, so one id is another tenant's elsewhere. Only the default keyspace is 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pd import PdClient
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import MAX_KEYSPACE
from tikv_br.progress_events import Notice, Reporter

DEFAULT = 0


def chosen_keyspace(cluster: Cluster, given: str | int) -> int:
    """The id of a keyspace that is given by its id or its name; ``""`` is the default one. A number is not looked up.

    Raises `UsageError` if PD knows none of that id or name, `ClusterUnfit` for one of API V3.
    """
    if isinstance(given, int):
        return given
    found = cluster.pd.keyspace_id(given)
    if given.isdecimal() and 0 < found <= MAX_KEYSPACE and keyspace_name_of(cluster, found) == "":
        raise UsageError(
            f"the cluster has no keyspace {found}",
            hint="Create it in PD, or pass the name or the id of one that PD knows.",
        )
    return found


def keyspace_name_of(cluster: Cluster, keyspace_id: int) -> str | None:
    """As `PdClient.keyspace_name`; None also before API V2, which has no keyspaces."""
    return cluster.pd.keyspace_name(keyspace_id) if cluster.api_version is ApiVersion.V2 else None


def keyspace_names(cluster: Cluster, ids: Iterable[int]) -> dict[int, str]:
    """The names of those that PD knows, without the default one; one request each."""
    if cluster.api_version is not ApiVersion.V2:
        return {}
    found = {each: cluster.pd.keyspace_name(each) for each in ids if each != DEFAULT}
    return {id_: name for id_, name in found.items() if name}


def show_keyspace(keyspace_id: int, names: Mapping[int, str]) -> str:
    """The name and the id of a keyspace, or the id alone."""
    name = names.get(keyspace_id)
    return f"{name} ({keyspace_id})" if name else str(keyspace_id)


def matching_keyspace(pd: PdClient, keyspace_id: int, names: Mapping[int, str], option: str, reporter: Reporter) -> int:
    """The id in a cluster of a keyspace of a backup, a log or another cluster: the one of the same name.

    Without a recorded name, or if this PD has no names, the keyspace with the same id. ``option`` chooses another one.
    Raises `UsageError` if PD has none of that name, or of that id without a name.
    """
    if keyspace_id == DEFAULT:
        return keyspace_id
    name, there = names.get(keyspace_id, ""), pd.keyspace_name(keyspace_id)
    if there is None or there == name != "":
        return keyspace_id
    if not (name or there):
        raise UsageError(
            f"the target has no keyspace {keyspace_id}, and the source records no name of it",
            hint=f"Create it in PD, or choose another one with {option}.",
        )
    if not name:
        reporter(
            Notice(
                f"the source records no name of keyspace {keyspace_id}: it is taken for {there} ({keyspace_id}) of the target; "
                f"if that is another one, pass {option}",
                warning=True,
            )
        )
        return keyspace_id
    try:
        found = pd.keyspace_id(name) if not name.isdecimal() else None
    except UsageError:
        found = None
    if found is None:
        other = f"; its keyspace {keyspace_id} is {there}" if there else ""
        raise UsageError(
            f"the target has no keyspace {name}, as the source's keyspace {keyspace_id} is called{other}",
            hint=f"Create it in PD, or choose another one with {option}.",
        )
    reporter(Notice(f"keyspace {name}: {keyspace_id} in the source, {found} in the target"))
    return found
