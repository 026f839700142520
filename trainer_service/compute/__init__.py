"""Computation of one batch by several ranks, which `process_group.py` joins on the nodes of
`topology.py`.

`trainer.py` runs on every rank. `control_group.py` carries rank 0's operations to the others. A
single CPU rank computes in parallel threads (`parallel.py`). `offload.py` moves a rank's state off
its device (`device_memory.py`) and back."""
