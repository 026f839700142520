"""Low-rank adapters (LoRA).

`adapters.py` adds adapters to a model and describes their files. `run_adapters.py` holds one run's
adapters. `merge.py` is a program that merges an adapter into its base model's files. `card.py`
writes an adapter's README.
"""
