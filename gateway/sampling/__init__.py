"""Sampling: sampling sessions, samplers and their engines.

A sampling session (`sessions`) names a weight version. Its client may sample before that is durable
(`early_sessions`). `implicit_sessions` are for requests that name none. `router` finds or creates
the `sampler`, which sends samples and loads to its engines. `balancer` chooses the engine, and
`replicas` sets their number. An `engine` describes its process to `gateway.workers`, which decides
where and when it runs."""
