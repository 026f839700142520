"""Low-rank adapters (LoRA): `adapters.py`, `run_adapters.py` (one run's), `card.py` (their README),
and the program `merge.py`, which merges an adapter into its base model."""
