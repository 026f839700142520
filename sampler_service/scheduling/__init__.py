"""What the engine does next: one thread admits requests, steps the engine and switches weights.

`queue` hands work from any thread to that thread, `scheduler` decides the order, and
`weight_switch` changes the loaded weights and keeps the engine's state.
"""
