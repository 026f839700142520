#!/usr/bin/env bash
# Writes the current digests of other projects' image tags: `scripts/pin_images.sh`. It needs Docker's
# buildx and a network. To use another version, change the tag first.
set -euo pipefail
cd "$(dirname "$0")/.."
files=(deploy/*.Dockerfile docker-compose.yaml k8s/components/*/*.yaml)
pinned='[a-z][a-z0-9./-]*:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}'
for image in $(grep -ohE "$pinned" "${files[@]}" | sed 's/@.*//' | sort -u); do
  digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
  [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "$image: no digest, but $digest" >&2; exit 1; }
  sed -i -E "s|$image@sha256:[0-9a-f]{64}|$image@$digest|" "${files[@]}"
  echo "$image@$digest"
done
