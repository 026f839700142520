# As the entry point of the official image does: makes the database while it serves on the socket alone.
set -eu
if [ "$(id -u)" = 0 ]; then
  chown postgres: "$PGDATA" /var/run/postgresql
  exec setpriv --reuid=postgres --regid=postgres --init-groups sh "$0"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  method=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
  initdb --encoding=UTF8 --username="$POSTGRES_USER" --auth=trust \
    ${POSTGRES_PASSWORD_FILE:+--pwfile="$POSTGRES_PASSWORD_FILE"}
  echo "host all all all $method" >> "$PGDATA/pg_hba.conf"
  pg_ctl --wait --options="-c listen_addresses=''" start
  createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl --wait --mode=fast stop
fi
exec postgres -c listen_addresses='*'
