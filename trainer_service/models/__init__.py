"""Hugging Face models: loading and measuring them (`huggingface.py`), packed attention
(`packing.py`), and their directories and safetensors files (`files.py`)."""
