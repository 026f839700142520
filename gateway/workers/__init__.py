"""Every process that Tandem runs: trainers, engines and jobs. See `docs/design/workers.md`.

A worker is one row of a `table`, made from a request (`requests`) for devices of a group
(`groups`). `schedule` decides the next `steps` from an `overview`: `placing` gives groups to
waiting rows, `turns` gives devices to placed rows, and `memory` counts bytes. The `loop` carries
the steps out (`step_runner`) through `adapters`. Rows and calls are in memory (`roster`, `demand`).
The `supervisor` is the interface for callers, and `holdings` its part for holders.

`run_options` reads the options of a run and its session. `request_maker` makes requests of them,
with the `needs` of the model. `declared_groups` reads the groups from the settings. `standing`
answers questions about an overview, and `worker_metrics` counts.

`processes` are the running workers. `launchers` start and stop them. `trainer_adapter`,
`engine_adapter` and `job_adapter` carry steps to them. `clients` and `sampler_client` make the gRPC
calls, which carry the gateway's `epoch`.

To add a kind of worker, derive it from `WorkerAdapter` and add the kind to `requests.Kind`. To add
a call, add the RPC to `protos/` and a method to the client."""
