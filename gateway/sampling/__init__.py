"""Sampling: what clients sample from, and the engines that serve it.

A sampling session (`sessions`) names a weight version. The `router` finds or makes the sampler that
can serve it and bounds the samples that wait; the `sampler` sends samples and loads to its engines,
the `balancer` says to which, and `replicas` how many there are. An `engine` is started when it is
needed, or was left by an earlier gateway and is adopted. Where engines may run, and when, is for
`gateway.placement` to say.
"""
