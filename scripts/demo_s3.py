#!/usr/bin/env python3
"""Serve S3 from memory (moto) on a free port of 127.0.0.1 with one bucket, print the endpoint, and run until told to end."""

from __future__ import annotations

import signal
import sys

import boto3
from moto.server import ThreadedMotoServer


def main() -> int:
    """Run; the first argument names the bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="demo",
        aws_secret_access_key="demo",  # noqa: S106 - moto takes any
    )
    client.create_bucket(Bucket=sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(endpoint, flush=True)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
