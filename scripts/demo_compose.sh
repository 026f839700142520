#!/usr/bin/env bash
# Runs the demo against the containers of docker-compose.yaml. It makes the demo's model in the
# trainer's container, gives it to the gateway, which is the only writer of models, and creates a key.
set -euo pipefail
cd "$(dirname "$0")/.."

if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
inside() { "${compose[@]}" exec -T "$@"; }

suffix=
if [ -n "$("${compose[@]}" ps -q gateway-gpu 2>/dev/null)" ]; then suffix=-gpu; fi
model=models/tiny-addition-0
inside "trainer$suffix" sh -ceu 'python -m tandem.demo.tiny_model /tmp/model >&2; tar -C /tmp/model -c .' \
  | inside "gateway$suffix" sh -ceu "mkdir -p $model; tar -C $model -x"
inside "gateway$suffix" tandem models add tandem/tiny-addition-0 "$model"
TINKER_API_KEY=$(inside "gateway$suffix" tandem keys create --owner demo --json | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["key"])')
export TINKER_API_KEY
port=$("${compose[@]}" port "gateway$suffix" 8000)
exec .venv/bin/tandem demo --base-url "http://${port/0.0.0.0/127.0.0.1}" --data-dir .tandem/demo-compose "$@"
