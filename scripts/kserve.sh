#!/usr/bin/env bash
# Installs the package kserve into .venv/kserve, for a nightly test of rendered InferenceServices. It has a separate
# folder, because it needs another release of psutil.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/kserve
lock=$root/constraints/kserve.txt
if ! cmp -s "$lock" "$folder/.lock"; then
  rm -rf "$folder"
  "$root/.venv/bin/uv" pip install --quiet --python "$root/.venv/bin/python" --target "$folder" --no-deps -r "$lock"
  cp "$lock" "$folder/.lock"
fi
