"""The record of runs: what people see of them.

`rows` reads the rows of runs and their optimizer steps. `identity` has a run's name, tags and
configuration.

To add a fact to a run's row, add a column to `storage.tables.runs`, a migration, and a field to
`rows.RunRecord`."""
