"""What a trainer writes to the shared filesystem and reads from it.

`publish.py` writes weight versions, which samplers serve, and `deltas.py` their files as what
changed. `snapshots.py` takes the snapshots that a crashed trainer is restored from.
`training_state.py` saves and loads checkpoints: weights, optimizer state and counters; `shards.py`
has the format of their files, and trusts none that it reads. `storage.py` says what a failed
write means and makes all ranks agree on it. Both kinds are written into a partial directory that
appears under its name by one rename.
"""
