"""Training runs and their ordered operations.

A run in memory is a `run.Run`. The `registry` holds it until its session ends, and `lifecycle`
starts and ends its trainer. `admission` writes an operation into the `journal` before the client
gets its request_id. The run's `dispatcher` keeps the order of `seq_id`. At the operation's turn the
`runner` prepares it, or `publishing` a weight version. `delivery` sends the call to the run's
`trainer` until it is answered. The journal then records the outcome. `trainer_host` is the process
of one or more runs, and `trainer_hosts` chooses it. `tools` are the shared parts of all runs.

After a trainer's death, `recovery` restores the next one from a snapshot and the later calls. The
next gateway resumes runs from their rows. A gateway that ends saves its runs or leaves them to the
next one (`stopping`). `record` reads the rows of runs and their optimizer steps.

To add a kind of operation:

1. Extend `operations.Kind`. If it has fields, add a class to `operations.Body`.
2. Add a method to `runner.OperationRunner`, called by `carry_out`.
3. Add the RPC to `protos/tandem/v1/trainer.proto`.
4. Add the route to `api/tinker/training.py`.
5. Add its name to `owners.usage.meter.UsageKind`, if it is metered under its own name.
6. Write the trainer's handler in `trainer_service/`."""
