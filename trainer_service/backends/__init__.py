"""How a model is loaded, sharded and computed: one backend per file.

`base.py` has `TrainerBackend`, whose docstring is the page from which to write one, and
`Capability`, what a backend may do besides; `loop.py` the loop over micro-batches that is there
unless a backend has its own. The built-in backend is `fsdp2.py`, with `token_logprobs.py` (what is
computed from a micro-batch), `sharding.py` (the mesh of ranks, and what is gathered together),
`copies.py` (what a rank alone computes with), `exporting.py` and `planning.py`.

To add a backend, write `backends/NAME.py` with a subclass of `TrainerBackend` and
`BACKEND = ThatClass`; a run chooses it by `tandem.backend = NAME` in its `user_metadata`. A package
of its own names its class in the entry-point group `tandem.trainer_backends` instead. Nothing else
needs to change.
"""

from trainer_service.backends.base import Capability, TrainerBackend, World, backend_named

__all__ = ["Capability", "TrainerBackend", "World", "backend_named"]
