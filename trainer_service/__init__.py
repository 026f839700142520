"""The trainer: one process group that trains one model (one training run).

Rank 0 is the process that the launcher started; it answers gRPC and hands each operation to
the other ranks. `python -m trainer_service` starts it; `tandem/worker.py` says how.
"""
