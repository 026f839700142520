"""The client of a run's record: `tandem.track` sends metrics and rollouts to the gateway.

- `run`: `TrackedRun`, the object of the user's loop, and `track`, which makes it.
- `values`: copies and encodes the user's values.
- `outbox`: a bounded buffer of rows between the loop and the sender.
- `sender`: a daemon thread that sends the rows again until the gateway has them.
- `exporters`: the same rows for W&B and TensorBoard, in the user's process.

To add an exporter, write a class with the methods of `Exporter`, and list it in `EXPORTERS`."""
