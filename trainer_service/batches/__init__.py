"""The way from a client's forward_backward message to micro-batches.

`validation.py` checks a message and makes a `Batch` of flat arrays, and `loss_inputs.py` its
tensors and settings. `micro_batches.py` divides it into micro-batches. `memory.py` recognises a
micro-batch that ran out of memory.
"""
