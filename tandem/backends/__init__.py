"""Trainer backends as gateways and agents see them, without an import of torch.

`registry` finds the names of built-in and installed backends. `memory` computes the bytes that a
trainer needs. To add a backend, put a file with `BACKEND` into `trainer_service/backends`, or
register a package in the entry-point group."""
