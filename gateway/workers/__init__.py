"""The workers of this gateway: the trainer and sampler processes, and the calls to them.

`launchers` start and stop workers. `fleet` gives each `worker` an id, a secret, a row and a
channel, and reports those that end; `heartbeats` finds those that do not answer, and `backoff` says
when one that failed is started again. `clients` are the gRPC calls to a trainer, with
their deadlines and errors, `sampler_client` those to a sampler, and `epoch` is what all carry.
"""
