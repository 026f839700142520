"""Sampling: what clients sample from, and the engines that serve it.

A sampling session (`sessions`) names a weight version. The router (in `sampler`) finds or starts
the sampler that can serve it and bounds the samples that wait; the sampler keeps its engine
running and sends it samples and loads.
"""
