"""The backends: each loads, shards and computes a model, one backend per file.

`TrainerBackend` (`base.py`) is the guide to writing one. `loop.py` is the default loop over
micro-batches. The built-in backend is `fsdp2.py`, with `token_logprobs.py`, `sharding.py`,
`copies.py`, `exporting.py` and `planning.py`.

To add a backend, write a subclass of `TrainerBackend` and describe it (`tandem/backends`). A run
chooses it by `tandem.backend = NAME` in its `user_metadata`."""

from trainer_service.backends.base import Capability, TrainerBackend, World, backend_named

__all__ = ["Capability", "TrainerBackend", "World", "backend_named"]
