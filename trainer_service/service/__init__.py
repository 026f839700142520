"""The trainer as a process: gRPC on rank 0, operations in order, and the other ranks' processes.

`servicer.py` admits a call, puts it into its run's order (`sequence.py`) and queues it for
`engine_thread.py`, the only thread that touches torch. `hosted_runs.py` finds the call's run.
`operations.py` checks the call, announces it to the other ranks and makes the reply. `switching.py`
is sleep and wake.

`rank_processes.py` forks and watches the other ranks. `nodes.py` and `node_connection.py` connect
hosts. `deaths.py` finds the cause when ranks end.

To add an operation: write a method of the servicer and of `Operations`, an `Op`, and a branch in
`Follower` for the other ranks."""
