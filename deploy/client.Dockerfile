# The image for users' scripts, with the SDK and tandem.rl: docker build -f deploy/client.Dockerfile .
ARG BASE_IMAGE=python:3.11.16-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

FROM ${BASE_IMAGE} AS build
ARG TANDEM_BUILD=cpu
# More places where pip finds packages.
ARG PIP_FIND_LINKS
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/tandem
COPY pyproject.toml ./
COPY constraints constraints
COPY scripts/install.sh scripts/
RUN python3 -m venv .venv && scripts/install.sh "$TANDEM_BUILD" demo
COPY README.md ./
COPY tandem tandem
COPY blueprints blueprints
RUN .venv/bin/uv pip install --python .venv/bin/python --no-deps --compile-bytecode . \
 && .venv/bin/uv pip uninstall --python .venv/bin/python pip uv

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp tandem \
 && install --directory --owner=tandem --group=tandem --mode=0755 /work
COPY --from=build /opt/tandem/.venv /opt/tandem/.venv
ARG TANDEM_VERSION=unversioned
LABEL org.opencontainers.image.title="tandem-client" \
      org.opencontainers.image.version="$TANDEM_VERSION" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH="/opt/tandem/.venv/bin:$PATH" HOME=/tmp
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER 10001:10001
WORKDIR /work
CMD ["python"]
