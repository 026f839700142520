"""Hugging Face models, independent of the architecture.

- `files.py`: a model's directory and its safetensors files.
- `huggingface.py`: loading and measuring a model.
- `logprobs.py`: log probabilities in chunks.
- `packing.py`: attention over packed rows.
- `activation_checkpointing.py`, `compiled_blocks.py`: the computation of blocks.
- `tensor_parallel.py`: matrices divided among ranks.

A model that cannot be trained or divided is refused: in the gateway by its `config.json`
(`tandem/weights/model_config.py`), else when the trainer starts (`check_trainable`, `check_causal`,
`tensor_parallel.py`). To test another architecture, add a small model of it to
`tests/support/architectures.py`.
"""
