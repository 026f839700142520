#!/usr/bin/env bash
# Runs a module of the published tinker-cookbook, such as
#   scripts/cookbook.sh tinker_cookbook.recipes.math_rl.train model_name=models/tiny \
#     renderer_name=role_colon
# in the current directory. The first run installs it into a separate folder, .venv/cookbook, so that
# its dependencies never meet ours. Without arguments the script only installs.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/cookbook
lock=$root/constraints/cookbook.txt
if ! cmp -s "$lock" "$folder/.lock"; then
  rm -rf "$folder"
  "$root/.venv/bin/uv" pip install --quiet --python "$root/.venv/bin/python" --target "$folder" --no-deps -r "$lock"
  cp "$lock" "$folder/.lock"
fi
[ $# -gt 0 ] || exit 0
exec env PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" "$root/.venv/bin/python" -m "$@"
