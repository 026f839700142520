#!/usr/bin/env bash
# Runs the core of the conformance suite under another release of the tinker SDK.
#
#   scripts/conformance.sh 0.27.2 [arguments of pytest]
#
# The release goes into build/sdk/VERSION and uses the dependencies of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?which release of tinker?}
shift
folder=$PWD/build/sdk/$version
if [ ! -d "$folder/tinker" ]; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
    --target "$folder" "tinker==$version"
fi
TANDEM_TEST_SDK=$folder exec .venv/bin/python -m pytest tests/conformance -m core "$@"
