"""The trainer: a process group that trains one model for one training run.

`python -m trainer_service` starts rank 0, as `tandem/protocol/worker.py` describes; rank 0 starts
the others. Folders, from top to bottom; each imports only those below it:

- `service`: gRPC, the order of operations, the processes of the other ranks;
- `checkpoints`: publishing weight versions, saving and loading training state;
- `compute`: ranks that compute a batch together;
- `backends`: how a model is loaded, sharded and differentiated;
- `optimizers`, `lora`, `batches`: update rules; adapters; from a client's message to checked
  micro-batches;
- `models`, `losses`: Hugging Face models and files; pure loss functions.
"""
