#!/usr/bin/env bash
# Everything that is to be measured on a GPU, in one run of less than eight minutes. It needs the environment of
# `make venv` with a torch for CUDA, and no network. Options go to benchmarks/gpu.py: `--device cpu --small` tries it out.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m benchmarks.gpu --json "${OUT:-benchmarks/results}/gpu.json" --plot "${OUT:-benchmarks/results}/gpu.png" "$@"
