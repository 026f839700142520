#!/usr/bin/env bash
# Installs Tandem's pinned dependencies into .venv, for setup.sh and the images. `scripts/install.sh cpu`
# installs all of cpu.txt. `scripts/install.sh cpu gateway postgres` installs only the dependencies of
# these extras of pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
shift
lock=constraints/$build.txt
pin() { grep -E "^$1==" "$lock" | head -n 1 | sed 's/ .*//'; }
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

pip "$(pin uv)"
uv() { .venv/bin/uv pip install --quiet --python .venv/bin/python "$@"; }

engine=engine-cuda
[ "$build" != cpu ] || engine=engine-cpu
extras=()
for extra in "$@"; do
  extras+=(--extra "$extra")
  [ "$extra" != sampler ] || extras+=(--extra "$engine")
done
if [ ${#extras[@]} = 0 ]; then
  cp "$lock" .venv/.lock
else
  pin torch > .venv/.overrides  # as in lock.sh
  .venv/bin/uv pip compile --quiet --no-annotate --no-header --python .venv/bin/python \
    --constraints "$lock" --overrides .venv/.overrides "${extras[@]}" pyproject.toml > .venv/.needed
  awk -F '==' 'NR == FNR { needed[$1]; next } $1 in needed' .venv/.needed "$lock" > .venv/.lock
fi

if grep -q '^torch==' .venv/.lock && [ "$build" = gpu ]; then
  echo "setup: the CUDA builds of torch and vLLM are several gigabytes, if not fetched before" >&2
elif grep -q '^torch==' .venv/.lock; then
  # torch comes first, in its exact version, so that no later package pulls in another build. It is
  # the CPU build of pip's index or folder, else uv's, else PyPI's own.
  torch=$(pin torch)
  .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '${torch#torch==}')" 2>/dev/null \
    || pip "$torch+cpu" 2>/dev/null \
    || { echo "setup: fetching the CPU build of $torch, about 200 MB" >&2; uv --torch-backend=cpu "$torch"; } \
    || {
      echo "setup: no CPU build of $torch can be had; PyPI's follows. On Linux with x86-64 it is the CUDA build:" >&2
      echo "setup: 6.5 GB with its libraries. To use another, press Ctrl-C and set PIP_FIND_LINKS or" >&2
      echo "setup: PIP_EXTRA_INDEX_URL to where torch's CPU builds are." >&2
      pip --verbose "$torch"  # shows progress: the function above has --quiet
    }
  sed -i '/^torch==/d' .venv/.lock
fi
# Compile byte code once here. Each start of an engine would take twice the time for it.
uv --compile-bytecode --no-deps -r .venv/.lock
