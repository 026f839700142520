"""Training runs, and the operations that are carried out on them in order.

An operation comes in through `RunRegistry.submit` (`registry`), which writes it into the
`journal` before its client gets a request_id. The run's `dispatcher` keeps the order of `seq_id`,
the window and the gaps. At its turn the `runner` prepares the operation and carries it out with
the run's trainer; the journal records the outcome and resolves the future. `training_run` has
what is known of one run, in memory and in the database.

To add a kind of operation:

1. `operations.Kind` and, if it has fields, a class in `operations.Body`;
2. its `prepare` and `carry_out` in `runner.OperationRunner`;
3. the RPC in `protos/tandem/v1/trainer.proto`, and its method in `workers.clients.TrainerClient`;
4. the route in `api/tinker/training.py`;
5. its name in `usage.meter.UsageKind`, if it is metered under its own name;
6. the trainer's handler in `trainer_service/`.
"""
