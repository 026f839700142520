"""The way from a client's forward_backward message to micro-batches.

`validation.py` checks a message and makes a `Batch` of flat arrays. `loss_inputs.py` decodes and
checks the loss's tensors and settings. `micro_batches.py` assigns datums to ranks and
micro-batches, and packs or pads them. `memory.py` recognises a micro-batch that ran out of memory.
"""
