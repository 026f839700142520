#!/usr/bin/env bash
# Makes the secrets of an overlay, which git ignores: `make secrets OVERLAY=k8s/overlays/cpu-dev`.
# It keeps existing files. For an overlay without a database, you write database-url.
set -euo pipefail
cd "$(dirname "$0")/.."
overlay=${OVERLAY:-k8s/overlays/cpu-dev}
[ -f "$overlay/kustomization.yaml" ] || { echo "$overlay is no overlay" >&2; exit 1; }
secrets=$overlay/secrets
umask 077
mkdir -p "$secrets"
new() { [ ! -e "$secrets/$1" ]; }
if new first-key; then printf %s "tml-$(openssl rand -hex 32)" > "$secrets/first-key"; fi
if new authority; then .venv/bin/tandem tls create "$secrets/authority"; fi
if grep -q "^  - ../../components/database$" "$overlay/kustomization.yaml"; then
  if new database-password; then openssl rand -hex 24 | tr -d '\n' > "$secrets/database-password"; fi
  if new database-url; then
    printf %s "postgresql://tandem:$(cat "$secrets/database-password")@tandem-database/tandem" > "$secrets/database-url"
  fi
elif new database-url; then
  echo "Write the database's URL into $secrets/database-url:" >&2
  echo "postgresql://tandem:PASSWORD@HOST/tandem?sslmode=verify-full&sslrootcert=system" >&2
fi
