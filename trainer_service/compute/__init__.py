"""Computation of one batch by several ranks.

`process_group.py` joins processes into one torch process group, on the nodes of `topology.py`.
`trainer.py` runs on every rank. `control_group.py` carries rank 0's operations to the others. A
single CPU rank computes its shares in parallel threads (`parallel.py`). `offload.py` moves a rank's
state off its device (`device_memory.py`) and back.
"""
