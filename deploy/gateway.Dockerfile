# The image of the gateway, without torch: docker build -f deploy/gateway.Dockerfile .
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
RUN python3 -m venv .venv && scripts/install.sh "$TANDEM_BUILD" gateway kubernetes postgres
COPY README.md ./
COPY tandem tandem
COPY blueprints blueprints
COPY gateway gateway
RUN .venv/bin/uv pip install --python .venv/bin/python --no-deps --compile-bytecode . \
 && .venv/bin/uv pip uninstall --python .venv/bin/python pip uv

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp tandem \
 && install --directory --owner=tandem --group=tandem --mode=0755 /etc/tandem/agent /etc/tandem/authority /etc/tandem/prometheus \
 && install --directory --owner=tandem --group=tandem --mode=0700 \
    /var/lib/tandem /var/lib/tandem/models /var/lib/tandem/logs /var/lib/tandem/private
COPY --from=build /opt/tandem/.venv /opt/tandem/.venv
ARG TANDEM_VERSION=unversioned
LABEL org.opencontainers.image.title="tandem-gateway" \
      org.opencontainers.image.version="$TANDEM_VERSION" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH="/opt/tandem/.venv/bin:$PATH" HOME=/tmp TANDEM_IMAGE_VERSION="$TANDEM_VERSION"
# For sslrootcert=system in the database's URL, because the bundled client looks in another folder.
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
ENV TANDEM_HOST=0.0.0.0 TANDEM_DATA_DIR=/var/lib/tandem
USER 10001:10001
WORKDIR /var/lib/tandem
EXPOSE 8000
CMD ["python", "-m", "gateway"]
