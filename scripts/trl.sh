#!/usr/bin/env bash
# Makes .venv/trl, an environment with TRL and without Tandem, for `make bench-trl` and a nightly test.
# TRL would import other packages of Tandem's, such as vLLM, if it found them. torch is a link to
# Tandem's own, so both compute with the same build.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/trl
lock=$root/constraints/trl.txt
cmp -s "$lock" "$folder/.lock" && exit 0
if grep -s -q '^gpu' "$root/.venv/.tandem-setup"; then
  echo "trl: this needs the CPU build (TANDEM_BUILD=cpu make setup)" >&2
  exit 1
fi
rm -rf "$folder"
"$root/.venv/bin/python" -m venv --without-pip "$folder"
"$root/.venv/bin/uv" pip install --quiet --python "$folder/bin/python" --compile-bytecode --no-deps -r "$lock"
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
for each in torch torchgen functorch "$(cd "$(packages "$root/.venv")" && echo torch-*.dist-info)"; do
  ln -s "$(packages "$root/.venv")/$each" "$(packages "$folder")/$each"
done
cp "$lock" "$folder/.lock"
