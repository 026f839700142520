"""The workers of this gateway: the trainer and sampler processes, and the calls to them.

`launchers` start and stop workers. `fleet` gives each one an id, a secret, a row and a channel,
and reports those that end. `clients` are the gRPC calls of a trainer and of a sampler, with their
deadlines and errors.
"""
