#!/usr/bin/env bash
# Runs the demo on kubectl's cluster, with an applied overlay: `make demo-cluster`. It waits for the
# gateway, copies the demo's model into the volume, creates a key, and forwards a port meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
kube() { kubectl --namespace "${NAMESPACE:-tandem}" "$@"; }
work=$(mktemp -d)
forward=
trap 'rm -rf "$work"; [ -z "$forward" ] || kill "$forward" 2>/dev/null || true' EXIT
until_there() {  # WHAT COMMAND…: prints the command's first output, within two minutes
  local found end=$((SECONDS + 120))
  until found=$("${@:2}") && [ -n "$found" ]; do
    if [ $SECONDS -ge $end ]; then echo "$1 did not come within 120 s" >&2; exit 1; fi
    sleep 1
  done
  echo "$found"
}

kube rollout status --timeout=15m deployment/tandem >&2
pod=$(until_there 'a serving gateway' kube get pod --selector tandem.dev/serving --output name)
.venv/bin/python -m tandem.demo.tiny_model "$work/model" >&2
model=models/tiny-addition-0
tar -C "$work/model" -c . \
  | kube exec --stdin "$pod" -- sh -ceu "mkdir -p $model; tar -C $model --no-same-owner -x"
kube exec "$pod" -- tandem models add tandem/tiny-addition-0 "$model"
TINKER_API_KEY=$(kube exec "$pod" -- tandem keys create --owner demo --json | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["key"])')
export TINKER_API_KEY
kube port-forward service/tandem :8000 > "$work/forward" &
forward=$!
port=$(until_there 'a forwarded port' sed -nE 's/^Forwarding from 127.0.0.1:([0-9]+) .*/\1/p' "$work/forward")
.venv/bin/tandem demo --base-url "http://127.0.0.1:$port" --data-dir .tandem/demo-cluster "$@"
