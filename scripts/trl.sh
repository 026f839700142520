#!/usr/bin/env bash
# Makes .venv/trl, an environment with TRL and without Tandem, for TRL jobs, `make bench-trl` and tests.
# TRL would import other packages of Tandem's, such as vLLM, if it found them. torch and its CUDA libraries
# are links to Tandem's own, so both compute with the same build.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/trl
lock=$root/constraints/trl.txt
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
ours=$(packages "$root/.venv")
want=$(cd "$ours" && echo torch-*.dist-info && cat "$lock" "$root/scripts/trl.sh" | sha256sum)
[ -f "$folder/.lock" ] && [ "$(cat "$folder/.lock")" = "$want" ] && exit 0
rm -rf "$folder"
"$root/.venv/bin/python" -m venv --without-pip "$folder"
"$root/.venv/bin/uv" pip install --quiet --python "$folder/bin/python" --compile-bytecode --no-deps -r "$lock"
for each in "$ours"/{torch,torchgen,functorch,triton,nvidia,cuda} "$ours"/{torch,triton}-*.dist-info; do
  [ ! -e "$each" ] || ln -s "$each" "$(packages "$folder")/"
done
echo "$want" > "$folder/.lock"
