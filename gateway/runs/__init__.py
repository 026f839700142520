"""Training runs, and the operations that are carried out on them in order.

A run in memory is a `training_run.TrainingRun`: the `registry` has it, from its creation to the end
of its session, and the `lifecycle` starts and ends its trainer. An operation comes in through the
`admission`, which writes it into the `journal` before its client gets a request_id. The run's
`dispatcher` keeps the order of `seq_id`, the window and the gaps. At its turn the `runner` prepares
the operation, and `delivery` sends the call to the run's `trainer` until it is answered; the
journal records the outcome and resolves the future. The `publisher` is for the calls that write a
weight version.

When the trainer dies, another one is brought to where it was (`restoration`) from the newest of the
`snapshots` that the `snapshot_taker` asked for, and the calls after it (`replay`). The next gateway
takes all of it up from its rows (`resumption`). A gateway that ends saves its runs or leaves them
to the next one (`stopping`).

To add a kind of operation:

1. `operations.Kind` and, if it has fields, a class in `operations.Body`;
2. its method of `runner.OperationRunner`, called by `carry_out`;
3. the RPC in `protos/tandem/v1/trainer.proto`;
4. the route in `api/tinker/training.py`;
5. its name in `usage.meter.UsageKind`, if it is metered under its own name;
6. the trainer's handler in `trainer_service/`.
"""
