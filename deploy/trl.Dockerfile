# The image of TRL jobs and of the agent that starts them: docker build -f deploy/trl.Dockerfile .
# Workers of jobs and trainers are in .venv, and TRL is in .venv/trl. Both use one torch.
ARG BASE_IMAGE=python:3.11.16-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

FROM ${BASE_IMAGE} AS build
ARG TANDEM_BUILD=cpu
# More places where pip finds packages.
ARG PIP_FIND_LINKS
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/tandem
COPY pyproject.toml ./
COPY constraints constraints
COPY scripts/install.sh scripts/trl.sh scripts/
RUN python3 -m venv .venv && scripts/install.sh "$TANDEM_BUILD" trainer && scripts/trl.sh
COPY README.md ./
COPY tandem tandem
COPY trainer_service trainer_service
RUN .venv/bin/uv pip install --python .venv/bin/python --no-deps --compile-bytecode . \
 && .venv/bin/uv pip uninstall --python .venv/bin/python pip uv

FROM ${BASE_IMAGE}
ARG TANDEM_BUILD=cpu
# Compilers for tandem.compile: Triton needs one for C, torch on a CPU one for C++.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
 && if [ "$TANDEM_BUILD" = gpu ]; then packages="gcc libc6-dev"; else packages=g++; fi \
 && apt-get install --yes --no-install-recommends $packages \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --no-create-home --home-dir /tmp tandem \
 && install --directory --owner=tandem --group=tandem --mode=0700 \
    /var/lib/tandem /var/lib/tandem/models /var/lib/tandem/logs
COPY --from=build /opt/tandem/.venv /opt/tandem/.venv
ARG TANDEM_VERSION=unversioned
LABEL org.opencontainers.image.title="tandem-trl" \
      org.opencontainers.image.version="$TANDEM_VERSION" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH="/opt/tandem/.venv/bin:$PATH" HOME=/tmp TANDEM_IMAGE_VERSION="$TANDEM_VERSION"
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/tandem
EXPOSE 7400
CMD ["tandem", "agent", "--listen", "0.0.0.0:7400", "--tls", "/etc/tandem/agent", \
     "--data-dir", "/tmp/agent", "--logs", "/var/lib/tandem/logs"]
