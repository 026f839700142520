"""The database and the data directory.

`database` (SQLite or PostgreSQL) has one writer task and group commit: `commits` carries a batch
out in the writer's thread, `log_sync` brings SQLite's log to the disk, and `drivers` knows how the
two databases differ. `tables` declares the tables, and `migrations` brings a database up to date.
`lease` says which of several gateways may use PostgreSQL. `log_files` are those of the gateway and
its workers. `data_directory` locks the directory and keeps the secrets in it. `futures` are the
results that clients wait for; `retention` removes old rows. To add a column, change `tables` and
add a migration to `migrations/versions`.
"""
