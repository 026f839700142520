"""Low-rank adapters (LoRA): their layers and files (`adapters.py`), one run's adapters
(`run_adapters.py`), their README (`card.py`), and a program that merges an adapter into its base
model (`merge.py`).
"""
