"""Hugging Face models: loading and measuring them (`huggingface.py`), log probabilities in chunks
(`logprobs.py`), packed attention (`packing.py`), checkpointed blocks
(`activation_checkpointing.py`), what they need of memory (`memory_plan.py`, `rehearsal.py`), and
their directories and safetensors files (`files.py`)."""
