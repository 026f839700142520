"""Trainer and sampler processes, and the calls to them.

`launchers` start and stop workers. `fleet` gives each `worker` an id, a secret, a row and a
channel. `heartbeats` finds silent workers, and `backoff` delays restarts. `clients` and
`sampler_client` make the gRPC calls, which carry the gateway's `epoch`. To add a call, add the RPC
to `protos/` and a method to the client."""
