"""The way from a client's forward_backward message to micro-batches: check (`validation.py`,
`loss_inputs.py`), divide (`micro_batches.py`), recognise lack of memory (`memory.py`)."""
