"""The database and the data directory.

`database` has one writer, which commits queued writes together: `fair_queue` lets owners take
turns, `commits` executes a batch and `log_sync` syncs SQLite's log. `drivers` holds the differences
between SQLite and PostgreSQL. `leadership` elects the one gateway that uses a PostgreSQL database.
`data_directory` holds the lock and the secrets, `log_files` rotates logs, `futures` holds results,
and `retention` removes old rows. To add a column, change `tables` and add a migration with a
test."""
