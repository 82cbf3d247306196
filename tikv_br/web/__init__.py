"""The HTTP side of a process: an address, a server, the paths of its status, and its metrics. Operations supply the content.

Modules, in reading order:

- `address`: addresses to listen on, and status keys
- `server`: the HTTP server, without any paths
- `status`: ``/status``, ``/healthz`` and ``/metrics`` of a process, read-only
- `metrics`: metrics in the formats of Prometheus, for HTTP and for files
"""
