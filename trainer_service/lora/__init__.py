"""Low-rank adapters: `adapters.py` adds them to a model and describes their files, `merge.py` is a
program that merges an adapter's files into a base model's."""
