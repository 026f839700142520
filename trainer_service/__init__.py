"""The trainer: a process group that trains one model for one run, or for several LoRA runs.

`python -m trainer_service` starts rank 0 (`tandem/protocol/worker.py`), and rank 0 starts the
others. Each folder imports only folders below it:

- `jobs`: another worker, which runs whole trainings of other frameworks.
- `service`: gRPC, the order of operations, the other ranks' processes.
- `checkpoints`: weight versions and training state on disk.
- `compute`: ranks that compute a batch together.
- `backends`: loading, sharding and differentiating a model.
- `optimizers`, `lora`, `batches`: update rules, adapters, checked micro-batches.
- `models`, `losses`: Hugging Face models, pure loss functions."""
