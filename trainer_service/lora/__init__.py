"""Low-rank adapters: `adapters.py` adds them to a model and describes their files,
`run_adapters.py` has those of one run, and `merge.py` is a program that merges an adapter's files
into a base model's."""
