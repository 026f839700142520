#!/usr/bin/env bash
# Resolves the constraint files: `scripts/lock.sh cpu` or `scripts/lock.sh gpu`.
# They contain names and versions, no addresses. A locked package keeps its version if possible.
# UPGRADE=1 takes the newest versions.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
uv=.venv/bin/uv
[ -x "$uv" ] || uv=uv
other=engine-cpu
[ "$build" != cpu ] || other=engine-cuda
mapfile -t extras < <(sed -n '/^\[project.optional/,/^$/s/^\([a-z-]*\) = .*/--extra=\1/p' pyproject.toml | grep -v "$other")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Both builds of vLLM require this torch. The CPU build requires a build of torch that not every machine
# can download, so torch is pinned. It also requires packages that no text model needs. They are left out.
echo "torch==2.13.0" > "$work/override.txt"
[ -n "${UPGRADE:-}" ] || cp "constraints/$build.txt" "$work/lock.txt"
"$uv" pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url \
  --override "$work/override.txt" "${extras[@]}" --group dev \
  pyproject.toml constraints/requirements.in -o "$work/lock.txt"
if [ "$build" = cpu ]; then
  grep -v -i -E '^(nvidia-[^m]|cuda-|triton|torchaudio|torchvision|torchcodec|tilelang)' "$work/lock.txt" > "$work/kept.txt"
else
  cp "$work/lock.txt" "$work/kept.txt"
fi
{
  echo "# Made by scripts/lock.sh $build. Names and versions only."
  cat "$work/kept.txt"
} > "constraints/$build.txt"
