# Debian's PostgreSQL with the interface of the official image, as far as docker-compose.yaml and
# k8s/components/database use it.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
# hadolint ignore=DL3008
RUN groupadd --system --gid=999 postgres \
 && useradd --system --uid=999 --gid=999 --home-dir=/var/lib/postgresql postgres \
 && apt-get update \
 && apt-get install --yes --no-install-recommends postgresql-15 \
 && rm -rf /var/lib/apt/lists/* /var/lib/postgresql/* \
 && install --directory --owner=postgres --group=postgres /var/lib/postgresql/data
ENV PATH="/usr/lib/postgresql/15/bin:$PATH" PGDATA=/var/lib/postgresql/data
COPY postgres.sh /
# To end sessions at once, as the official image does: on SIGTERM it would wait for clients to leave.
STOPSIGNAL SIGINT
CMD ["sh", "/postgres.sh"]
