# Debian's Prometheus with the interface of the official image, as far as docker-compose.yaml uses it.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends prometheus wget \
 && rm -rf /var/lib/apt/lists/* \
 && install --directory --owner=nobody --group=nogroup /prometheus
USER 65534:65534
ENTRYPOINT ["prometheus"]
