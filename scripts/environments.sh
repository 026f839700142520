#!/usr/bin/env bash
# Installs the environment packages reasoning-gym and verifiers into .venv/environments, for nightly
# tests. They have a separate folder, because verifiers needs another release of the openai package.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/environments
lock=$root/constraints/environments.txt
if ! cmp -s "$lock" "$folder/.lock"; then
  rm -rf "$folder"
  "$root/.venv/bin/uv" pip install --quiet --python "$root/.venv/bin/python" --target "$folder" --no-deps -r "$lock"
  cp "$lock" "$folder/.lock"
fi
