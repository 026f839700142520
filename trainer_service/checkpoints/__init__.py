"""The trainer's files on the shared filesystem.

- `publish.py` writes weight versions.
- `handoff.py` hands a version's weights to a sampler in memory.
- `snapshots.py` takes the snapshots that restore a crashed trainer, from a copy (`staging.py`).
- `training_state.py` saves and loads checkpoints. `shards.py` defines the format of their files and
  trusts none that it reads.
- `storage.py` explains failed writes and makes all ranks agree on them.

Versions and checkpoints are written into a partial directory, which gets its name by one rename."""
