# As the entry point of the official image does: makes the database while it serves on the socket alone.
set -eu
chown postgres: "$PGDATA" /var/run/postgresql
as_postgres() { setpriv --reuid=postgres --regid=postgres --init-groups "$@"; }
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  as_postgres initdb --encoding=UTF8 --username="$POSTGRES_USER" --auth="$POSTGRES_HOST_AUTH_METHOD"
  as_postgres pg_ctl --wait --options="-c listen_addresses=''" start
  as_postgres createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  as_postgres pg_ctl --wait --mode=fast stop
fi
exec setpriv --reuid=postgres --regid=postgres --init-groups postgres
