#!/usr/bin/env bash
# Builds the images of the gateway, the workers and the client: `make images`. With REGISTRY, it pushes them too.
#
#   make images LOAD=kind                                       tandem-NAME:dev, into the node (or k3s)
#   make images REGISTRY=registry.example.org TAG=0.1.0 BUILD=gpu
#
# IMAGES="gateway trl sampler" builds others. DOCKER_ARGS goes to each `docker build`.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${TAG:-dev} names=()
case ${LOAD:-} in '' | kind | k3s) ;; *) echo "LOAD is kind or k3s, not $LOAD" >&2; exit 1 ;; esac
for image in ${IMAGES:-gateway trainer sampler client}; do
  name=${REGISTRY:+$REGISTRY/}tandem-$image:$tag
  # shellcheck disable=SC2086  # several arguments
  docker build --file "deploy/$image.Dockerfile" --tag "$name" ${DOCKER_ARGS:-} \
    --build-arg TANDEM_BUILD="${BUILD:-cpu}" --build-arg TANDEM_VERSION="$tag" .
  names+=("$name")
done
if [ -n "${REGISTRY:-}" ]; then
  for name in "${names[@]}"; do docker push "$name"; done
fi
case ${LOAD:-} in
  kind) kind load docker-image "${names[@]}" ;;
  k3s) docker save "${names[@]}" | sudo k3s ctr images import - ;;
esac
