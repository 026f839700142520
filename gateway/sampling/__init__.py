"""Sampling: what clients sample from, and the engines that serve it.

A sampling session (`sessions`) names a weight version. The `router` finds or makes the sampler that
can serve it and bounds the samples that wait; the `sampler` starts its engine when it is needed, or
adopts the one that an earlier gateway has left, and sends it samples and loads. Where engines may
run, and when, is for `gateway.placement` to say.
"""
