"""From a client's forward_backward message to micro-batches.

`validation.py` checks a message and makes a `Batch` of flat arrays; `loss_inputs.py` decodes and
checks the tensors and settings of its loss. `micro_batches.py` plans which rank computes which
datums together, and packs or pads them. `memory.py` recognises a micro-batch that does not fit into
memory, and says what is tried next.
"""
