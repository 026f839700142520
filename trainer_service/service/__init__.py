"""The trainer as a process: gRPC on rank 0, operations in order, and the other ranks' processes.

`servicer.py` admits a call, puts it into the order of its run (`sequence.py`) and queues it for the
only thread that touches torch (`engine_thread.py`). `hosted_runs.py` finds the run of the call.
`operations.py` checks the call, announces it to the other ranks and makes the reply. `switching.py`
lets all ranks sleep and wake.

`rank_processes.py` forks and watches the other ranks; `trainer_service/__main__.py` is the program
of rank 0, and `trainer_service/node.py` that of another host, with `nodes.py` and
`node_connection.py` between the two. `deaths.py` says whom to blame when ranks end.

To add an operation: a method of the servicer and of `Operations`, an `Op`, and a branch in
`Follower` for what the other ranks do.
"""
