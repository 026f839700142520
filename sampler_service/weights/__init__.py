"""Verifies and loads weight versions.

- `loader`: replaces the engine's weights by a full version.
- `files`: reads a version's tensors, and applies the patches of a delta.
- `handoff`: opens weights that a trainer hands over in memory.
- `read_ahead`: reads and verifies a version before its turn.
- `staging`: copies tensors into pinned memory.
- `adapters`: keeps LoRA adapters beside the base model.

`loader` and `adapters` use `Engine`. Both verify manifest and tensors before they change anything.
Both compare the engine's logprobs with the trainer's (the canary) before a version serves. To add
another source of weights, extend `Loader.verify`, `Loader.place` and `Engine`.
"""
