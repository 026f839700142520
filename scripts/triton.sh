#!/usr/bin/env bash
# Installs Triton into .venv/triton, for tests of vLLM's second model runner. On a CPU, Triton's
# interpreter computes. It has a separate folder, so that torch and vLLM do not find it elsewhere. With
# a GPU, torch already includes it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/triton
lock=$root/constraints/triton.txt
grep -s -q '^gpu' "$root/.venv/.tandem-setup" && exit 0
if ! cmp -s "$lock" "$folder/.lock"; then
  rm -rf "$folder"
  "$root/.venv/bin/uv" pip install --quiet --python "$root/.venv/bin/python" --target "$folder" --no-deps -r "$lock"
  cp "$lock" "$folder/.lock"
fi
