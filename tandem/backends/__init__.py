"""Trainer backends, as gateways and agents know them: without an import of torch.

`registry` finds the names of the built-in and the installed backends. `memory` computes the bytes
that a trainer needs.
"""
