"""Weight versions in an engine: what they must contain, and how they are verified and loaded.

`loader` replaces the engine's weights by a full version. `files` reads its tensors, and applies the
patches of a delta. `read_ahead` verifies it before its turn. `staging` brings it into pinned
memory. `adapters` keeps LoRA adapters beside the base model.
Both go through `Engine`, verify the manifest and the tensors before anything is changed, and
compare the engine's logprobs with the trainer's (the canary) before a version serves.
"""
