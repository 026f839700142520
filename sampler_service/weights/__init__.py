"""Verifies and loads weight versions.

- `loader`: replaces the engine's weights by a full version.
- `adapters`: keeps LoRA adapters beside the base model.
- `files`: reads tensors.
- `handoff`: opens weights in a trainer's memory.
- `read_ahead`: reads and verifies a version before its turn.
- `staging`: copies tensors into pinned memory.

`loader` and `adapters` verify manifest and tensors before they change anything. They compare the
engine's logprobs with the trainer's (the canary) before a version serves. To add another source of
weights, extend `Loader.verify`, `Loader.place` and `Engine`."""
