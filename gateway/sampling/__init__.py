"""Sampling: sampling sessions, samplers and their engines.

A sampling session (`sessions`) names a weight version. `router` finds or creates its sampler.
`sampler` sends samples and loads to its engines. `balancer` chooses the engine, and `replicas` sets
their number. An `engine` starts on demand or is adopted from an earlier gateway.
`gateway.placement` decides where and when engines run."""
