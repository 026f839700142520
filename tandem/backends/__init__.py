"""Trainer backends as gateways and agents see them, without an import of torch.

A step backend (`fsdp2`) computes operations in Tandem's trainer. A job backend (`trl`) trains a
whole job with another framework. `registry` finds both kinds, built-in and of installed packages.
`jobs` defines a job backend's configuration, and `rendering` turns one into a command. `frameworks`
finds the environments of frameworks. `memory` computes the bytes that a trainer needs.

To add a backend, decorate its configuration with `register_backend`. A package names the module of
this class in the entry-point group `tandem.trainer_backends`. A built-in backend has a module here,
and a line in `registry`."""

from tandem.backends.description import BackendDescription, register_backend

__all__ = ["BackendDescription", "register_backend"]
