"""Recovery of a run: its replay log, its snapshots, and their use in a new trainer.

`snapshot_taker` decides when the trainer takes a snapshot, and `snapshots` keeps the folders, rows
and bytes. `replay_log` has the calls after them. `restoration` brings a new trainer to the state of
a dead one. `resumption` reads the rows of an earlier gateway. See `docs/design/recovery.md`."""
