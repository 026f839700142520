#!/usr/bin/env bash
# Installs Triton into .venv/triton, where tests of vLLM's second model runner look for it: on a CPU
# its interpreter computes. A folder of its own, so that torch and vLLM find none otherwise. With a
# GPU, torch has brought one.
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
