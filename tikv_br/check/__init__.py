"""Health check of cluster, storage and this machine: small probes, each with a status and advice.

Modules, in reading order:

- probe: what a probe is and returns, and the connections that probes share
- cluster_probes, storage_probes: the probes of a cluster and a storage
- run: the probes of this machine; runs all probes, and formats the results for Nagios

Imports tasks, cluster, storage and backupset. Writes only to a scratch folder of the storage, which it removes.
"""
