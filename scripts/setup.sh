#!/usr/bin/env bash
# Makes .venv in the checkout and installs Tandem into it. Quick when nothing changed.
#
# The build of torch and vLLM is chosen here and nowhere else: the CUDA builds where an
# NVIDIA GPU answers, the CPU builds elsewhere. TANDEM_BUILD=cpu|gpu overrides the choice;
# PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

build=${TANDEM_BUILD:-}
if [ -z "$build" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then build=gpu; else build=cpu; fi
fi
lock=constraints/$build.txt
stamp=.venv/.tandem-setup
want="$build $(cat "$lock" pyproject.toml scripts/setup.sh | sha256sum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
[ -n "$python" ] || { echo "setup: Python 3.11, 3.12 or 3.13 is needed (set PYTHON to one)" >&2; exit 1; }

echo "setup: $build build with $("$python" --version) into .venv (some minutes the first time)" >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
pin() { grep -E "^$1==" "$lock" | head -n 1 | sed 's/ .*//'; }
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

pip "$(pin uv)"
uv() { .venv/bin/uv pip install --quiet --python .venv/bin/python "$@"; }

if [ "$build" = gpu ]; then
  echo "setup: the CUDA builds of torch and vLLM are several gigabytes, if not fetched before" >&2
else
  # torch first and by its exact version, so that nothing later pulls in another build: the CPU
  # build of an index or a folder that pip knows, else the one that uv knows, else PyPI's own.
  torch=$(pin torch)
  .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '${torch#torch==}')" 2>/dev/null \
    || pip "$torch+cpu" 2>/dev/null \
    || { echo "setup: fetching the CPU build of $torch, about 200 MB" >&2; uv --torch-backend=cpu "$torch"; } \
    || {
      echo "setup: no CPU build of $torch can be had; PyPI's follows. On Linux with x86-64 it is the CUDA build:" >&2
      echo "setup: 6.5 GB with its libraries. To use another, press Ctrl-C and set PIP_FIND_LINKS or" >&2
      echo "setup: PIP_EXTRA_INDEX_URL to where torch's CPU builds are." >&2
      pip --verbose "$torch"  # shows how far it is: the function above has --quiet
    }
fi
# Everything that the lock names, and nothing that it does not.
grep -v -E '^(torch|uv)==' "$lock" > .venv/.lock
if [ "$build" = gpu ]; then pin torch >> .venv/.lock; fi
# Byte code now rather than at every start of an engine, where it costs twice the time.
uv --compile-bytecode --no-deps -r .venv/.lock
uv --no-deps -e .
echo "$want" > "$stamp"
