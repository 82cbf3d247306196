"""Messages and service stubs of the public wire format, generated from ``proto/`` by ``scripts/generate_proto.sh``.

Nothing here is written by hand, and nothing else of the project lives here.
"""
