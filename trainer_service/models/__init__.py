"""Hugging Face models, independent of the architecture: their files, loading, log probabilities in
chunks, packed rows, checkpointed and compiled blocks, tensor parallelism.

A model that cannot be trained or divided is refused: in the gateway by its `config.json`
(`tandem/weights/model_config.py`), else when the trainer starts. To test another architecture, add
a small model of it to `tests/support/architectures.py`."""
