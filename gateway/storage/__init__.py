"""The database and the data directory.

`database` reads and writes SQLite or PostgreSQL: one writer task commits queued writes together.
`commits` executes one batch, `log_sync` syncs SQLite's log, and `drivers` holds the differences
between the two databases. `tables` declares the tables and `migrations` updates an older database.
`lease` elects the one gateway that uses a PostgreSQL database. `data_directory` locks the data
directory and keeps its secrets. `log_files` rotates logs, `futures` holds results for clients, and
`retention` removes old rows. To add a column, change `tables` and add a migration with a test.
"""
