"""The status of syncs over HTTP: JSON, health and Prometheus metrics. Read-only.

Modules, in reading order:
- status: the status of a sync, when it is unhealthy or degraded
- server: the Prometheus metrics; what ``--status-addr`` answers, on `tikv_br.web`
"""
