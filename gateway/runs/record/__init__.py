"""The record of runs: what people see of them.

- `rows`: the rows of runs and of their optimizer steps. `identity`: name, tags and configuration.
- `store`: the one writer of metrics and rollouts, and their readers. `files`: segments of lines.
- `metrics` and `rollouts`: the lines, their limits, and pages of rollouts.
- `curves`: downsampled curves, read from the files as they grow. `lineage`: parents of runs.
- `progress`: the index in the database: counters, newest values, percent and eta.
- `events`: starts, moves and ends of a run's workers.
- `identity_files` and `reader`: `run.json`, and reading without a database.

To add a fact to a run's row, add a column to `storage.tables.runs`, a migration, and a field to
`rows.RunRecord`."""
