"""How ranks compute a batch together.

`process_group.py` turns processes into the ranks of one torch process group, on the nodes that
`topology.py` derives from specification and environment. `trainer.py` is what every rank then runs:
its share of each batch and its optimizer steps; by `control_group.py`, rank 0 tells the others what
to do. On one CPU rank the shares run in parallel threads instead (`parallel.py`). `offload.py`
moves a rank's state off its device (`device_memory.py`) and back.
"""
