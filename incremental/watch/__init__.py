"""The status of syncs over HTTP: JSON, health, Prometheus metrics, and a page with plots. Read-only.

Modules, in reading order:
- status: the status of a sync, when it is unhealthy or degraded, and the history of the last minutes
- metrics: the Prometheus metrics
- server: what ``--status-addr`` answers, on `tikv_br.web`; ``page.html`` is the page
"""
