"""Sampling: what clients sample from, and the engines that serve it.

A sampling session (`sessions`) names a weight version. The `router` finds or starts the sampler
that can serve it and bounds the samples that wait; the `sampler` sends samples and loads to its
engine, which the `engine_supervisor` keeps running. `implicit_sessions` are those of requests
that name no session.
"""
