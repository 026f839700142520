"""Sampling: sampling sessions, samplers and their engines.

A sampling session (`sessions`) names a weight version. `router` finds or creates its sampler.
`sampler` sends samples and loads to its engines. `balancer` chooses the engine, and `replicas` sets
their number. An `engine` describes its process to `gateway.workers`, which decides where and when
it runs."""
