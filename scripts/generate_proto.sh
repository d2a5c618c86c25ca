#!/usr/bin/env bash
# Regenerates scissorhands/v1 from proto/. With --check, fails if the committed code is not current.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.
if [ "${1:-}" = "--check" ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
python -m grpc_tools.protoc -Iproto --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    proto/scissorhands/v1/*.proto
if [ "$out" != . ]; then
    diff -r -x __init__.py -x __pycache__ "$out/scissorhands/v1" scissorhands/v1
    echo "generated code is current"
fi
