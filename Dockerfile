# syntax=docker/dockerfile:1
# An image of tikv-br: `docker build -t tikv-br .`; docs/kubernetes.md describes it, scripts/check_container.py runs these steps without Docker.
# Bookworm has Java 17, which the tests run with; for Python 3.11 there is a wheel of tikv-client.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Compilers, for the extension with the kernels: numba refuses to make it without one of C++, too.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements requirements
# PySpark has no wheel. What builds it and tikv-br is installed first: pip would fetch it by itself, and check no hash.
RUN python -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt \
    && /build/bin/pip wheel --no-cache-dir --no-build-isolation --no-deps --require-hashes --wheel-dir /wheels -r requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY formats formats
COPY incremental incremental
COPY tikv_br tikv_br
RUN /build/bin/pip wheel --no-cache-dir --no-build-isolation --no-index --no-deps --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/tikv-br \
    && pip --python /opt/tikv-br/bin/python install --no-cache-dir --no-index --no-deps /wheels/*.whl
# Not in /src, whose packages would be imported instead of the installed ones.
WORKDIR /
RUN PYTHONPATH=/opt/tikv-br/lib/python3.11/site-packages /build/bin/python -m tikv_br.formats.precompile --extension
# Examples, and jars of Spark for what tikv-br does not use: Hive, machine learning, Spark Connect, RocksDB for state of streams, other systems.
WORKDIR /opt/tikv-br/lib/python3.11/site-packages/pyspark
RUN rm -r examples data \
    jars/rocksdbjni-*.jar jars/spark-connect_*.jar jars/spark-mllib*.jar jars/spark-graphx_*.jar jars/spark-hive*.jar \
    jars/hive-exec-*.jar jars/hive-metastore-*.jar jars/datanucleus-*.jar jars/derby*.jar \
    jars/breeze*.jar jars/spire*.jar jars/cats-kernel_*.jar jars/algebra_*.jar jars/JTransforms-*.jar \
    jars/arpack*.jar jars/lapack-*.jar jars/blas-*.jar jars/netty-tcnative-*-osx-*.jar jars/netty-tcnative-*-windows-*.jar

FROM ${BASE}
# Versions are not pinned: Debian removes a version as soon as it has a fixed one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home tikv-br
COPY --from=build /opt/tikv-br /opt/tikv-br
ENV PATH=/opt/tikv-br/bin:$PATH
USER 10001:10001
WORKDIR /home/tikv-br
# Commands that end, as backups do, have no health; docs/kubernetes.md has a health check for the others.
HEALTHCHECK NONE
ENTRYPOINT ["tikv-br"]
