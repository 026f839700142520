"""Hugging Face models: loading and measuring them (`huggingface.py`), log probabilities in chunks
(`logprobs.py`), packed attention (`packing.py`), checkpointed blocks
(`activation_checkpointing.py`), and their directories and safetensors files (`files.py`)."""
