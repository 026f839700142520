#!/usr/bin/env bash
# Makes .venv in the checkout and installs Tandem into it. Quick when nothing changed.
#
# Only this script chooses the builds of torch and vLLM: CUDA if an NVIDIA GPU answers, else CPU.
# TANDEM_BUILD=cpu|gpu overrides the choice. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

build=${TANDEM_BUILD:-}
if [ -z "$build" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then build=gpu; else build=cpu; fi
fi
stamp=.venv/.tandem-setup
want="$build $(cat "constraints/$build.txt" pyproject.toml scripts/setup.sh scripts/install.sh | sha256sum)"
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
scripts/install.sh "$build"
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps -e .
echo "$want" > "$stamp"
