#!/usr/bin/env bash
# Installs the package kubeflow into .venv/kubeflow, for a test of rendered TrainJobs. It has a separate folder,
# because it needs another release of the kubernetes package.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/kubeflow
lock=$root/constraints/kubeflow.txt
if ! cmp -s "$lock" "$folder/.lock"; then
  rm -rf "$folder"
  "$root/.venv/bin/uv" pip install --quiet --python "$root/.venv/bin/python" --target "$folder" --no-deps -r "$lock"
  cp "$lock" "$folder/.lock"
fi
