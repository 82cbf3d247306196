#!/usr/bin/env bash
# Generate tikv_br/cluster/pb/ from proto/. The result is committed: run this after editing a .proto.
set -euo pipefail

cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
out=tikv_br/cluster/pb
PATH="$(cd "$(dirname "$python")" && pwd):$PATH" # protoc looks up the mypy plugins there

mkdir -p "$out"
find "$out" -name '*_pb2*' -delete

"$python" -m grpc_tools.protoc -I proto \
    --python_out="$out" --mypy_out="quiet:$out" \
    proto/*.proto
# Stubs only for the files that have a service.
mapfile -t services < <(grep -l '^service ' proto/*.proto | LC_ALL=C sort)
"$python" -m grpc_tools.protoc -I proto \
    --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
    "${services[@]}"

# protoc writes absolute imports of bare module names; ours live in a package.
sed -i -E \
    -e 's/^import ([a-z_0-9]+_pb2)( as .*)?$/from tikv_br.cluster.pb import \1\2/' \
    "$out"/*_pb2.py "$out"/*_pb2_grpc.py "$out"/*.pyi
