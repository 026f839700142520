"""Weight versions in an engine: what they must contain, and how they are verified and loaded.

`loader` replaces the engine's weights by a full version, whose tensors come from `files`, which
puts in the changes where it is a delta (`made_files`); `read_ahead` verifies it before its turn,
and `staging` brings it into pinned memory; `adapters` keeps LoRA adapters beside the base model.
Both go through `Engine`, verify the manifest and the tensors before anything is changed, and
compare the engine's logprobs with the trainer's (the canary) before a version serves.
"""
